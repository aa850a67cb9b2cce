"""The names of the metrics that a run produces: what the config tells, and what the run shows.

Those of a task of ours are known before the run (`problems`), as are the fields that it reads;
tests/tasks compares them with what the tasks return. Those of a user's task are learned
from the first log line and the first evaluation (`RequestedMetric`).
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from hpctrain.base.errors import ConfigError
from hpctrain.base.names.metric_names import better
from hpctrain.config.metric_registry import TRAIN_LOSS, TRAIN_NAME, registered
from hpctrain.config.schema import Config

_OF_TRAINING = [m.name for m in registered("train") if m.name not in (TRAIN_LOSS, TRAIN_NAME)]
_OF_SPEED = [metric.name for metric in registered("perf")]


def names(config: Config) -> tuple[str, ...] | None:
    """Return the metrics that the run can produce; None for a task that is not ours."""
    own = of_task(config.task)
    if own is None:
        return None
    training = (*(f"train/{name}" for name in own), *_OF_TRAINING)
    sets = [] if config.data.evaluated is None else ["val"]
    sets += [f"val/{name}" for name in config.data.other_sets]
    shown = (*own, *measured(config.task))
    evaluation = (f"{one}/{name}" for one in sets for name in shown)
    return (*training, *evaluation, *_OF_SPEED)


def problems(config: Config, needed: bool = False) -> Iterator[str]:
    """Yield why no run with this config has the metrics that the config names.

    Unless it is `needed`, as in a search, the default of `metric` may be missing.
    """
    if config.metric != Config().metric or needed:
        yield from _problems(config, "metric", config.metric)
    for key, metric in _deciding(config):
        if metric.startswith("perf/"):
            yield f"{key}={metric}: it must be train/NAME or val/NAME; ranks differ in their speed"
        elif wrong := [*_problems(config, key, metric)]:
            yield from wrong
        elif better(metric) is None:
            yield (
                f"{key}={metric}: its name does not tell which values are better: it needs a word "
                "such as loss, error or distance (lower), or accuracy, score or reward (higher)"
            )


def _deciding(config: Config) -> Iterator[tuple[str, str]]:
    """Yield each key that names a metric by which the run decides, and the metric."""
    lowers = config.scheduler.kind == "plateau" and config.scheduler._target_ is None
    for key, metric in (
        ("train.early_stopping.metric", config.train.early_stopping.metric),
        ("checkpoint.best", config.checkpoint.best),
        ("scheduler.plateau.metric", config.scheduler.plateau.metric if lowers else None),
    ):
        if metric is not None:
            yield key, metric


def _problems(config: Config, key: str, metric: str) -> Iterator[str]:
    """Yield why no run with this config has the metric that `key` names."""
    known = names(config)
    if metric in (known or _OF_SPEED):
        return
    group, _, name = metric.partition("/")
    if known is None and group in ("train", "val") and name:
        if group == "val" and config.data.evaluated is None and not config.data.other_sets:
            yield f"{key}={metric}: data.val_split is null, so there is no evaluation"
    elif known is None and group != "perf":
        yield f"{key}={metric}: it must be train/NAME, val/NAME or perf/NAME"
    else:
        yield _unknown(key, metric, known or _OF_SPEED)


def _unknown(key: str, metric: str, known: Collection[str]) -> str:
    near = difflib.get_close_matches(metric, known, 1, cutoff=0.5)
    hint = f"did you mean {near[0]}? " if near else ""
    return f"{key}={metric}: {hint}this run produces {', '.join(known)}"


@dataclass(frozen=True)
class RequestedMetric:
    """The metric that was asked for with a task of a user, whose names the run has to show.

    All ranks have the same names, so they decide alike.
    """

    # `train/NAME` or `val/NAME`; "" if the config check has answered, or for the default.
    name: str = ""
    key: str = "metric"  # the config key that names it

    @classmethod
    def of(cls, config: Config) -> list[RequestedMetric]:
        """Return what is left to check of a config without `problems`."""
        asked = [] if config.metric == Config().metric else [cls(config.metric)]
        asked += [cls(metric, key) for key, metric in _deciding(config)]
        return [one for one in asked if names(config) is None and not one._is_fixed]

    @property
    def _is_fixed(self) -> bool:
        """Whether every training has the metric, whatever its task."""
        return self.name.startswith("perf/") or self.name in _OF_TRAINING

    def is_doubtful(self, seen: Collection[str]) -> bool:
        """Return whether only an evaluation can tell that the metric exists.

        A task usually has the same names in training and in an evaluation. If the first log line
        does not have the name, an evaluation at once tells it before hours of training are spent.
        """
        group, _, name = self.name.partition("/")
        doubtful = group == "val" and f"train/{name.rpartition('/')[2]}" not in seen
        return doubtful and any(text.startswith("train/") for text in seen) and not _of(group, seen)

    def check(self, seen: Collection[str]) -> None:
        """Raise a ConfigError if the metric is not in its group, once that is `seen`."""
        known = _of(self.name.partition("/")[0], seen)
        if self.name and known and self.name not in known:
            raise ConfigError(_unknown(self.key, self.name, seen))


def _of(group: str, seen: Collection[str]) -> list[str]:
    return [name for name in seen if name.startswith(f"{group}/")]


# The arguments that name a field, or a list of fields.
_FIELDS = {
    "Classification": ("input", "target"),
    "MultiLabel": ("input", "target"),
    "Regression": ("input", "target"),
    "LanguageModel": ("tokens",),
}


def of_task(task: Mapping[str, Any]) -> tuple[str, ...] | None:
    """Return the sums of a section `task`, and what follows from them; None for a task not ours."""
    match _kind(task):
        case "Classification":
            return ("loss", "accuracy", *(f"top{k}_accuracy" for k in task.get("top_k") or ()))
        case "MultiLabel":
            return ("loss", "accuracy", "precision", "recall", "f1")
        case "Regression":
            target = task.get("target")
            named = task.get("channels") or (target if isinstance(target, list) else ())
            errors = ("loss", "mse", "mae", "relative_l2")
            return (*errors, *(f"mse/{name}" for name in named), "rmse")
        case "LanguageModel":
            return ("loss", "bits_per_byte", "perplexity")
    return None


def measured(task: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of the metrics that only an evaluation has."""
    given = task.get("metrics")
    return tuple(given) if isinstance(given, dict) else ()


def fields(task: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield each key of a task of ours that names a field of the data, and the field."""
    for name in _FIELDS.get(_kind(task), ()):
        value = task.get(name)
        for each in value if isinstance(value, list) else [value]:
            if each is not None:
                yield f"task.{name}", str(each)


def _kind(task: Mapping[str, Any]) -> str:
    package, _, kind = str(task.get("_target_")).rpartition(".")
    return kind if package.startswith("hpctrain.tasks") and kind in _FIELDS else ""
