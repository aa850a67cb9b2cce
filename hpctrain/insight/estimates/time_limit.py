"""`launch.time_min=auto`: what the last run of the same model has measured, with a margin.

    seconds = start-up + steps x step + evaluations + checkpoints
    limit   = seconds x 1.3 + launch.warn_s, in whole minutes

The first steps of train.batch_size_ramp count as their part of a whole step.
"""

import math
from typing import Any, NamedTuple

from hpctrain.config.rules.batch_sizes import ramp_of
from hpctrain.config.schema import Config, DataConfig
from hpctrain.errors import ConfigError
from hpctrain.insight.estimates.measured_run import (
    ENOUGH_STEPS,
    MeasuredRun,
    frozen,
    runs_of_model,
)

_MARGIN = 1.3
# What decides the time of a step, beside the number of ranks.
_DECIDING = (
    *("model", "task._target_", "data.windows", "data.images.size", "precision.compute"),
    *("train.global_batch_size", "train.compile", "train.activation_checkpointing"),
    *("optimizer._target_", "launch.tasks_per_node", "launch.gpus_per_node", "site.partition"),
    *(f"parallel.{name}" for name in ("device", "dp_shard", "zero", "tp", "cp", "pp", "ep")),
)


class _Duration(NamedTuple):
    """The expected time of a run without interruptions."""

    seconds: float
    steps: int
    run: MeasuredRun


def expected(config: Config) -> _Duration | None:
    """Return the time of a run; None without a measured run that is like it, or without an end."""
    if (run := like_run(config)) is None or (steps := _steps(config, run)) is None:
        return None
    train, ramp = config.train, ramp_of(config.train)
    whole = ramp.samples(steps) / ramp.final
    per_epoch = (run.samples_per_epoch or 0) // ramp.final
    evaluations = steps / train.eval_every if train.eval_every else whole / (per_epoch or whole)
    saves = steps // (config.checkpoint.every_steps or steps) + 1
    seconds = run.startup_s + whole * run.mean_step_s
    seconds += run.evaluation_s * math.ceil(evaluations) + run.checkpoint_s * saves
    return _Duration(seconds, steps, run)


def pin(config: Config) -> None:
    """Put the minutes in the place of `launch.time_min=auto`, in place.

    It is a ConfigError if no run has measured the same model, or the end of the run is unknown.
    """
    if (duration := expected(config)) is None:
        raise ConfigError(f"launch.time_min=auto: {_why_none(config)}")
    # A job saves in the time of `warn_s` before its limit.
    minutes = duration.seconds * _MARGIN / 60 + config.launch.warn_s / 60
    config.launch.time_min = math.ceil(minutes)


def note(config: Config) -> str:
    """Return what `launch.time_min=auto` has taken, for a reader."""
    if (duration := expected(config)) is None:
        return ""
    return (
        f"launch.time_min=auto is {config.launch.time_min} minutes: {duration.steps} steps as "
        f"measured by {duration.run}, {duration.seconds / 60:.3g} minutes in all, times the margin "
        f"{_MARGIN}, and launch.warn_s"
    )


def like_run(config: Config) -> MeasuredRun | None:
    """Return the newest run whose steps are like those of a config; None if there is none."""
    runs = runs_of_model(config.model, config.output_dir)
    return next((run for run in runs if not _differences(config, run)), None)


def _differences(config: Config, run: MeasuredRun) -> list[str]:
    """Return what decides the time of a step and differs between a config and a run."""
    there = frozen(run.path)
    pairs = {name: (_value(config, name), _value(there, name)) for name in _DECIDING}
    pairs["the number of ranks"] = config.asked_world_sizes.start, run.ranks
    return [f"{name} is {a}, and there {b}" for name, (a, b) in pairs.items() if a != b]


def _value(node: Any, name: str) -> Any:
    for part in name.split("."):
        node = node.get(part) if isinstance(node, dict) else getattr(node, part)
    return node


def _why_none(config: Config) -> str:
    other = like_run(config) or next(runs_of_model(config.model, config.output_dir), None)
    if other is None:
        return (
            f"no run in {config.output_dir} has measured this model (at least {ENOUGH_STEPS} steps "
            "after its first report); give a number of minutes for the first run, for example "
            "launch.time_min=30 train.max_steps=100"
        )
    reasons = "; ".join(_differences(config, other)) or (
        f"it had other data than {config.data.path}, so the steps of an epoch are unknown: give "
        "train.max_steps, or a number of minutes"
    )
    return f"no measured run is like this one: {other.path.name} has the same model, but {reasons}"


def _steps(config: Config, run: MeasuredRun) -> int | None:
    train, lengths = config.train, []
    if train.max_steps is not None:
        lengths.append(train.max_steps)
    if train.max_epochs is not None:
        same = _parts(config.data) == _parts(frozen(run.path).data)
        if same and run.samples_per_epoch is not None:
            # Each epoch ends with whole steps only.
            whole = run.samples_per_epoch // train.global_batch_size * train.global_batch_size
            lengths.append(max(1, ramp_of(train).steps(train.max_epochs * whole)))
        elif not lengths:
            return None
    return min(lengths, default=None)


def _parts(data: DataConfig) -> str:
    """Return what decides the number of samples of an epoch."""
    parts = (data.mixture, data.train_split, data.subset, data.group, data.repeat, data.windows)
    folds = data.fold_of and data.fold_of[1]  # the folds of one number have about one size
    return repr((data.path, *parts, folds))
