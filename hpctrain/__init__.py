"""hpctrain: from a config to finished, trustworthy training runs on a SLURM cluster."""

from importlib import import_module
from typing import Any

__version__ = "0.3.0.dev0"
_API = ("submit", "train", "load_run", "submit_function", "session", "Session", "supervised")


def __getattr__(name: str) -> Any:
    """Import the functions of `hpctrain.api` when they are first used."""
    if name == "errors":
        return import_module("hpctrain.errors")
    if name in _API:
        return getattr(import_module("hpctrain.api"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_API})
