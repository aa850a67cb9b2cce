"""torchmetrics without the libraries that others of its metrics need: they take three seconds."""

from typing import Any
from unittest.mock import patch

from lightning_utilities.core import imports

_OTHERS = ("transformers", "matplotlib", "scipy")
_check, _available = imports.RequirementCache._check_available, imports.package_available


def _check_others(cache: Any) -> None:
    cache.available, cache.message = False, "left out"
    if not (cache.requirement or cache.module or "").startswith(_OTHERS):
        _check(cache)


with (
    patch.object(imports.RequirementCache, "_check_available", _check_others),
    patch.object(imports, "package_available", lambda n: n not in _OTHERS and _available(n)),
):
    import torchmetrics

__all__ = ["torchmetrics"]
