"""The training loop and the objects that it calls; `hpctrain.job.build` builds them.

The package can be called like the function `hpctrain.api.train`: the import system binds the name
`hpctrain.train` to the package as soon as a module in it is imported.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import Any


class _Train(ModuleType):
    def __call__(self, *overrides: str, **options: Any) -> float | None:
        """Call `hpctrain.api.train`."""
        result: float | None = import_module("hpctrain.api").train(*overrides, **options)
        return result


sys.modules[__name__].__class__ = _Train
