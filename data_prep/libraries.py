"""Libraries that only some commands need, imported when they are needed."""

from importlib import import_module
from typing import Any

from hpctrain.base.errors import DataError


def library(
    module: str, what: str = "this", *, name: str = "", install: str = "'hpctrain[prep]'"
) -> Any:
    """Import a library."""
    try:
        import_module(module.partition(".")[0])
        return import_module(module)
    except ImportError:
        raise DataError(
            f"{what} needs {name or module}, which is not installed: pip install {install}"
        ) from None
