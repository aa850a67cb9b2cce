"""hpctrain: from a config to finished, trustworthy training runs on a SLURM cluster."""

from importlib import import_module
from typing import Any

from hpctrain.base.version import __version__ as __version__

_API = {
    **dict.fromkeys(("submit", "train", "load_run", "submit_function", "session"), "hpctrain.api"),
    "Part": "hpctrain.engine.part",
    "Session": "hpctrain.engine.session",
    "supervised": "hpctrain.engine.loop",
}


def __getattr__(name: str) -> Any:
    """Import what users name when it is first used."""
    if name == "errors":
        return import_module("hpctrain.errors")
    if name in _API:
        return getattr(import_module(_API[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_API})
