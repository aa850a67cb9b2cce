"""Earlier runs that are like a config: their model, and what else decides the time of a step.

Only the newest runs of `output_dir` are looked at, and their names are read once for a sweep.
"""

import functools
import os
from collections.abc import Iterator
from contextlib import suppress
from operator import attrgetter
from pathlib import Path
from typing import Any

from hpctrain.config.frozen import dump
from hpctrain.config.rules.batch_sizes import BatchSizes
from hpctrain.config.rules.degrees import Degrees
from hpctrain.config.schema import Config
from hpctrain.disk import text_of
from hpctrain.errors import ConfigError, HpctrainError
from hpctrain.estimates.measured_run import MeasuredRun, measured_run

_MOST_RUNS = 200
_DECIDING = (
    *("data.images.size", "precision.compute", "train.compile", "train.activation_checkpointing"),
    *("optimizer._target_", "parallel.device", "site.partition"),
    *(f"parallel.{name}" for name in ("tp", "cp", "pp", "ep")),
)


def runs_of_model(config: Config) -> Iterator[MeasuredRun]:
    """Yield the runs with enough steps whose model has the same config, the newest first.

    The `output_dir` of the config is absolute.
    """
    candidates = _candidates(config.output_dir)
    wanted = _model_lines(dump(config)) if candidates else ""
    for path, lines in candidates:
        if lines == wanted:
            try:
                yield measured_run(path)
            except (HpctrainError, OSError, ValueError, LookupError, TypeError, AttributeError):
                continue  # it has too few steps, or it is damaged


def like_run(config: Config) -> MeasuredRun | None:
    """Return the newest run whose steps are like those of a config; None if there is none.

    It has the same model, samples, formats and way to divide the model, on the same kind of
    machine; the number of ranks may be another. The `output_dir` of the config is absolute.
    """
    return next((r for r in runs_of_model(config) if not differences(config, r.config)), None)


def differences(config: Config, other: Config) -> list[str]:
    """Return what decides the time of a sample and differs between two configs."""
    there = _kind(other)
    return [
        f"{name} is {here}, and there {there[name]}"
        for name, here in _kind(config).items()
        if here != there[name]
    ]


def _kind(config: Config) -> dict[str, Any]:
    """Return by name what decides the time of a sample."""
    windows, launch = config.data.windows, config.launch
    sharded = config.parallel.dp_shard != 1
    return {
        "model": config.model,
        "task": config.task.get("_target_"),
        "data.windows.length": windows.length if windows.field else None,
        "GPUs": launch.gpus_per_run or launch.gpus_per_node > 0,
        "hardware": config.hardware.get("name"),
        "parallel.zero": config.parallel.zero if sharded else None,
        **{name: attrgetter(name)(config) for name in _DECIDING},
    }


def share_of(config: Config, ranks: int) -> float:
    """Return the samples of a data-parallel rank in a step; those of a wrong config are 0."""
    try:
        return BatchSizes.of(config, Degrees.of(config.parallel, ranks)).share
    except (ConfigError, ZeroDivisionError):
        return 0.0


@functools.lru_cache(maxsize=16)
def _candidates(output_dir: str) -> tuple[tuple[Path, str], ...]:
    """Return the newest runs that have a journal, each with the lines of its model."""
    found: list[tuple[float, Path]] = []
    with suppress(OSError), os.scandir(output_dir) as entries:
        for run in (Path(entry.path) for entry in entries):
            with suppress(OSError):
                found.append((Path(run, "journal", "events.jsonl").stat().st_mtime, run))
    newest = [path for _, path in sorted(found, reverse=True)[:_MOST_RUNS]]
    return tuple((path, _model_lines(text_of(path / "config.yaml"))) for path in newest)


def _model_lines(text: str) -> str:
    """Return the section `model` of a frozen config, which has the same text for the same model."""
    lines = text.splitlines()
    begin = next((i for i, line in enumerate(lines) if line.startswith("model:")), len(lines))
    end = begin + 1
    while end < len(lines) and lines[end].startswith((" ", "-")):
        end += 1
    return "\n".join(lines[begin:end])
