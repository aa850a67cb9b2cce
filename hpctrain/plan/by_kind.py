"""`launch.gpu_type`: the layout of a run on each kind of GPU on which its job may start.

    submission ── by_kind CONFIG... ── a line for each kind ── shown, or refused
    batch script ── by_kind --run DIR... ── layout.json ── all ranks (`hpctrain.job.here`)

What the command or the config says itself is kept: parallel, the micro-batches, and activation
checkpointing. The global batch is the same in each layout.
"""

import json
import logging
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from hpctrain.config.frozen import load
from hpctrain.config.schema import Config, ParallelConfig, TrainConfig
from hpctrain.disk import write_atomically
from hpctrain.errors import ConfigError, HpctrainError
from hpctrain.hardware import Hardware, of_device, smallest
from hpctrain.job.building.instantiate import instantiate
from hpctrain.monitor.gpus import Gpus
from hpctrain.plan.inspecting.sample_shape import of_data
from hpctrain.plan.predicting.estimator import Estimator
from hpctrain.plan.ranking import rank
from hpctrain.record import written
from hpctrain.run_record import ChosenLayout
from hpctrain.runs.run_dir import RunDir

log = logging.getLogger(__name__)
_BATCH = ("accumulate", "micro_batch_size")
_NOT_CHOSEN = ("device", "backend", "timeout_s", "sync")  # keys of parallel that are no layout


def _estimator(config: Config) -> Estimator:
    task = instantiate("task", config.task)
    return Estimator.of_config(config, task, of_data(config.data))


def choices(
    config: Config, kinds: Iterable[Hardware], overrides: Iterable[str] = ()
) -> Iterator[ChosenLayout | str]:
    """Yield the best layout on each kind, or why nothing fits."""
    kept = _kept(config, [text.partition("=")[0] for text in overrides])
    estimator = _estimator(config)
    size = config.launch.node_numbers[0], config.launch.tasks_per_node
    for hardware in kinds:
        # micro_batch_size=auto finds the largest that fits by itself.
        fixed = kept - {"accumulate"} if config.train.micro_batch_size == "auto" else kept
        ranking = rank(config, estimator, hardware, [size], fixed)
        if not ranking.best:
            yield "; ".join(f"{name}: {reason}" for name, reason in ranking.excluded.items())
            continue
        layout, reason = ranking.best[0].layout, ranking.best[0].reason
        micro = f"micro-batches of {layout.batch.micro} samples"
        text = f"{hardware.title}: {layout.label}, {micro} ({reason})"
        added = tuple(text for text in layout.overrides if not _is_kept(text, kept))
        yield ChosenLayout(text=text, overrides=added)


def lines(config: Config, overrides: Iterable[str]) -> Iterator[str]:
    """Yield the choice on each kind in words; one on which nothing fits is a ConfigError."""
    kinds = config.launch.gpu_features
    for kind, found in zip(kinds, choices(config, map(smallest, kinds), overrides), strict=True):
        if isinstance(found, str):
            raise ConfigError(
                f"launch.gpu_type={config.launch.gpu_type}: nothing fits on {kind} ({found}); "
                "leave it out, or ask for more nodes"
            )
        yield f"on {kind}: {' '.join([found.text, *found.overrides])}"


def _kept(config: Config, named: list[str]) -> set[str]:
    """Return what was set: in the command, or in the config to something else than the default."""
    sections = {"parallel": ParallelConfig(), "train": TrainConfig()}
    changed = {name.lstrip("+") for name in named}
    for section, usual in sections.items():
        own = vars(getattr(config, section))
        changed |= {f"{section}.{key}" for key, value in vars(usual).items() if own[key] != value}
    changed -= {f"parallel.{key}" for key in _NOT_CHOSEN}
    kept = {"parallel"} if any(name.startswith("parallel") for name in changed) else set[str]()
    kept |= {"accumulate"} if any(f"train.{key}" in changed for key in _BATCH) else set()
    mode = "activation_checkpointing"
    return kept | ({mode} if f"train.{mode}" in changed else set())


def _is_kept(text: str, kept: set[str]) -> bool:
    section, _, key = text.partition("=")[0].partition(".")
    of_batch = key in _BATCH and "accumulate" in kept
    return section == "launch" or section in kept or key in kept or of_batch


def _title() -> str:
    """Return the name of the first GPU of this node, as its driver tells it; "" without one."""
    from hpctrain.distributed.devices import visible

    return Gpus(visible("cuda")[:1]).facts.get("gpu_0", "")


def _choose(run: RunDir, title: str) -> None:
    """Write layout.json for the GPUs of this node, or log why the layout is as it was given."""
    hardware = of_device(title)
    if hardware is None:
        log.warning("launch.gpu_type: %r is no known GPU: the layout is as given", title)
        return
    (found,) = choices(load(run.config_file), [hardware], run.read().overrides)
    if isinstance(found, str):
        log.warning("launch.gpu_type: nothing is foreseen to fit on %s: %s", title, found)
    else:
        write_atomically(run.path / "layout.json", written(found))


def main(argv: list[str]) -> int:
    """Choose for run directories; or print the choices for configs, or what is wrong with one.

    A config is a JSON list: the words for its runs, its path, and their overrides.
    """
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    if argv[0] != "--run":
        for about, path, *overrides in map(json.loads, argv):
            try:
                for line in lines(load(Path(path)), overrides):
                    print(f"{about} {line}")
            except ConfigError as error:
                print(*str(error).splitlines(), f"[{about}]")
                return error.exit_code
        return 0
    title, runs = _title(), [RunDir.open(Path(each)) for each in argv[1:]]
    for run in runs:  # what an attempt on another kind has chosen
        (run.path / "layout.json").unlink(missing_ok=True)
    for run in runs:
        try:
            _choose(run, title)
        except HpctrainError as error:
            log.warning("launch.gpu_type: the layout is as given: %s", error)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
