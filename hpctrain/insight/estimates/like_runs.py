"""Earlier runs that are like a config: their model, and what else decides the time of a step.

Only the newest runs of `output_dir` are looked at, and their names are read once for a sweep.
"""

import functools
import re
from collections.abc import Iterator
from contextlib import suppress
from heapq import nlargest
from pathlib import Path
from typing import Any

from hpctrain.base.files.disk import text_of
from hpctrain.config.frozen import dump
from hpctrain.config.schema import Config
from hpctrain.errors import HpctrainError
from hpctrain.insight.estimates.measured_run import MeasuredRun, measured_run

_MOST_RUNS = 200
_DECIDING = (
    *("model", "task._target_", "data.windows", "data.images.size", "precision.compute"),
    *("train.global_batch_size", "train.compile", "train.activation_checkpointing"),
    *("optimizer._target_", "launch.tasks_per_node", "launch.gpus_per_node", "site.partition"),
    *(f"parallel.{name}" for name in ("device", "dp_shard", "zero", "tp", "cp", "pp", "ep")),
)


def runs_of_model(config: Config) -> Iterator[MeasuredRun]:
    """Yield the runs with enough steps whose model has the same config, the newest first.

    The `output_dir` of the config is absolute.
    """
    candidates = _candidates(config.output_dir)
    wanted = _model(dump(config)) if candidates else ""
    for path, model in candidates:
        if model == wanted:
            try:
                found = measured_run(path)
            except (HpctrainError, OSError, ValueError, LookupError, TypeError, AttributeError):
                continue  # it is damaged
            if found is not None:
                yield found


def like_run(config: Config) -> MeasuredRun | None:
    """Return the newest run whose steps are like those of a config; None if there is none.

    The `output_dir` of the config is absolute.
    """
    return next((run for run in runs_of_model(config) if not differences(config, run)), None)


def differences(config: Config, run: MeasuredRun) -> list[str]:
    """Return what decides the time of a step and differs between a config and a run."""
    pairs = {name: (_value(config, name), _value(run.config, name)) for name in _DECIDING}
    pairs["the number of ranks"] = config.asked_world_sizes.start, run.ranks
    return [f"{name} is {a}, and there {b}" for name, (a, b) in pairs.items() if a != b]


def _value(config: Any, name: str) -> Any:
    for part in name.split("."):
        config = config.get(part) if isinstance(config, dict) else getattr(config, part)
    return config


@functools.lru_cache(maxsize=16)
def _candidates(output_dir: str) -> tuple[tuple[Path, str], ...]:
    """Return the newest runs that have a journal, each with the text of its model."""
    journals = Path(output_dir).glob("*/journal/events.jsonl")
    newest = [file.parents[1] for file in nlargest(_MOST_RUNS, journals, key=_changed)]
    return tuple((path, _model(text_of(path / "config.yaml"))) for path in newest)


def _changed(file: Path) -> float:
    with suppress(OSError):
        return file.stat().st_mtime
    return 0.0


def _model(text: str) -> str:
    """Return the section `model` of a frozen config, which has the same text for the same model."""
    found = re.search(r"^model:.*\n([ -].*\n)*", text, re.MULTILINE)
    return found[0] if found else ""
