"""What the config tells about hpctrain's own tasks: their metrics, and the fields that they read.

This module does not import torch. tests/tasks compares it with what the tasks return.
"""

from collections.abc import Iterator, Mapping
from typing import Any

# The arguments that name a field, or a list of fields.
_FIELDS = {
    "Classification": ("input", "target"),
    "MultiLabel": ("input", "target"),
    "Regression": ("input", "target"),
    "LanguageModel": ("tokens",),
}


def metrics(task: Mapping[str, Any]) -> tuple[str, ...] | None:
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
