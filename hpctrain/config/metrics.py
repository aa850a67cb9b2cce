"""The names of the metrics that a run produces, as far as the config tells them."""

from __future__ import annotations

import difflib
from collections.abc import Iterator

from hpctrain.config.schema import Config

# The sums of our tasks, and what they derive from them. Other tasks have names of their own.
_OF_TASK = {
    "Classification": ("loss", "accuracy"),
    "LanguageModel": ("loss", "bits_per_byte", "perplexity"),
}
_OF_TRAINING = (
    *("lr", "epoch", "grad_norm", "skipped_steps", "bubble", "expert_load_max", "expert_dropped"),
)
_OF_SPEED = ("samples_per_s", "data_wait_fraction")


def names(config: Config) -> tuple[str, ...] | None:
    """Return the metrics that the run can produce; None for a task that is not ours."""
    package, _, kind = str(config.task.get("_target_")).rpartition(".")
    if not package.startswith("hpctrain.tasks") or kind not in _OF_TASK:
        return None
    training = tuple(f"train/{name}" for name in (*_OF_TASK[kind], *_OF_TRAINING))
    evaluation = tuple(f"val/{name}" for name in _OF_TASK[kind])
    speed = tuple(f"perf/{name}" for name in _OF_SPEED)
    return training + (() if config.data.val_split is None else evaluation) + speed


def problems(config: Config, needed: bool = False) -> Iterator[str]:
    """Yield why no run with this config has the metric `config.metric`.

    Args:
        config: The config of a run.
        needed: Whether the metric must be there, as in a search. Otherwise the default may be
            missing.
    """
    metric, known = config.metric, names(config)
    if (metric == Config().metric and not needed) or (known is not None and metric in known):
        return
    group, _, name = metric.partition("/")
    if known is None and group in ("train", "val", "perf") and name:
        if group == "val" and config.data.val_split is None:
            yield f"metric={metric}: data.val_split is null, so there is no evaluation"
    elif known is None:
        yield f"metric={metric}: it must be train/NAME, val/NAME or perf/NAME"
    else:
        near = difflib.get_close_matches(metric, known, 1, cutoff=0.5)
        hint = f"did you mean {near[0]}? " if near else ""
        yield f"metric={metric}: {hint}this run produces {', '.join(known)}"
