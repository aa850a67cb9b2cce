"""Python code of the user that gives samples: a function in a file."""

import importlib.util
import inspect
import linecache
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data_prep.formats.samples import Unusable
from data_prep.source import SourceFile
from hpctrain.base.errors import ConfigError, DataError
from hpctrain.data.shards.field import name_problem

SPLIT = "split"  # the key of a sample that names its split
_PARTS = ("part", "parts")
SHOWN = 3  # lines of a traceback that a message has


@dataclass(frozen=True)
class Code:
    """The function that the user names, and its arguments."""

    file: str  # absolute path
    name: str  # name of the function
    args: Mapping[str, Any]  # its arguments
    # How many times a function with the parameters `part` and `parts` is called, or None.
    parts: int | None = None

    def items(self, part: int) -> Iterator[tuple[str, Any]]:
        """Yield what the function gives for a part, each after its name for messages."""
        of = f" of part {part}" if self.parts else ""
        number = -1
        try:
            more = {"part": part, "parts": self.parts} if self.parts else {}
            found = _load(self.file, self.name)(**self.args, **more)
            if any(base.__name__ == "DataLoader" for base in type(found).__mro__):
                raise DataError(
                    f"{self.file}: {self.name} gives batches; yield the samples of its data set"
                )
            if isinstance(found, Mapping) or not hasattr(type(found), "__iter__"):
                raise DataError(
                    f"{self.file}: {self.name} returns a {type(found).__name__}, no samples one by "
                    "one; a function yields a dict for each sample of a data set (docs/data.md)"
                )
            for number, values in enumerate(found):
                yield f"sample {number}{of}", values
        except (DataError, GeneratorExit):
            raise
        except (Exception, SystemExit) as error:
            where = f"{self.file}: {self.name}, sample {number + 1}{of}"
            raise DataError(f"{where}: {_told(error)}") from None


def sample_of(values: Any) -> tuple[dict[str, Any], str]:
    """Return the fields of what a function has yielded, and its split or ""."""
    if not isinstance(values, Mapping):
        raise Unusable(f"it is a {type(values).__name__}; a sample is a dict of fields")
    fields = dict(values)
    split = fields.pop(SPLIT, "")
    if not isinstance(split, str) or (SPLIT in values and not split):
        raise Unusable(f"its 'split' is {split!r}, no name")
    for name in fields:
        if not isinstance(name, str):
            raise Unusable(f"the field {name!r} has no text for a name")
    if split and (problem := name_problem(split, "split")):
        raise Unusable(problem)
    return fields, split


def place_of(function: str) -> tuple[str, str]:
    """Return the path of the file, and the name of the function in it."""
    place, _, name = function.rpartition(":")
    if not name or not place.endswith(".py"):
        raise ConfigError(
            f"{function!r} is not FILE.py:NAME; a function there may import any module, and "
            "yield the samples of a data set"
        )
    return str(Path(place).absolute()), name


def parts_of(file: str, name: str, args: Mapping[str, Any], pieces: int | None) -> int | None:
    """Return the number of parts; None if the function has no parameters `part` and `parts`."""
    try:
        signature = inspect.signature(_load(file, name))
        takes = all(part in signature.parameters for part in _PARTS)
        signature.bind(**({"part": 0, "parts": 1} if takes else {}), **args)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{file}: {name} cannot be called: {error}; see --arg") from None
    if pieces is not None and not takes:
        raise ConfigError(f"--pieces: {file}: {name} has no parameters part and parts")
    return (pieces or 1) if takes else None


def _load(file: str, name: str) -> Callable[..., Any]:
    """Return the function of a file, which is imported as a module of its own."""
    module = _module(file)
    found = getattr(module, name, None)
    if not callable(found):
        own = module.__name__
        known = [k for k, v in vars(module).items() if getattr(v, "__module__", "") == own]
        raise ConfigError(f"{file} has no function {name!r}; it has {', '.join(known) or 'none'}")
    function: Callable[..., Any] = found
    return function


def _module(file: str) -> Any:
    SourceFile.of(file)
    folder = str(Path(file).parent)
    if folder not in sys.path:  # as with `python FILE.py`, whose neighbours it may import
        sys.path.insert(0, folder)
    spec = importlib.util.spec_from_file_location(f"data_prep_python_{Path(file).stem}", file)
    assert spec is not None  # the name ends in .py
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    linecache.checkcache(file)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise DataError(f"{file} cannot be imported: {_told(error)}") from None
    return module


def _told(error: BaseException) -> str:
    """Return an exception of the user's code as text, with the last lines of its traceback."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename != __file__ and not frame.filename.startswith("<frozen")
    ]
    lines = [f"  {f.filename}, line {f.lineno}, in {f.name}: {f.line}" for f in frames[-SHOWN:]]
    what = "".join(traceback.format_exception_only(error)).strip()
    return "\n".join([what, *lines])
