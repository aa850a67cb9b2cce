"""What extensions of ours give to the core and to each other, by name.

offered.pyi ── `from module import what as name` ── offered.name: imported when it is asked for

The core never imports an extension. A type checker reads offered.pyi, too, so what is done with it
is checked.
"""

import ast
import functools
from importlib import import_module
from pathlib import Path
from typing import Any


@functools.cache
def table() -> dict[str, tuple[str, str]]:
    """Return the module and the name in it of each name."""
    found = ast.parse(Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8")).body
    imports = [node for node in found if isinstance(node, ast.ImportFrom)]
    return {str(one.asname): (str(node.module), one.name) for node in imports for one in node.names}


def __getattr__(name: str) -> Any:
    """Return what an extension offers under a name."""
    if name not in table():
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, inner = table()[name]
    found = import_module(module)
    # pkgutil.resolve_name would hide what a module fails to import.
    return getattr(found, inner) if hasattr(found, inner) else import_module(f"{module}.{inner}")
