"""Python code of the user that gives samples: a function, or a data set such as torch's."""

import importlib
import importlib.util
import inspect
import json
import linecache
import os
import sys
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from data_prep.formats.samples import Unusable, field_of, fitted
from data_prep.source import SourceFile
from hpctrain.data.shards.field import check_name
from hpctrain.errors import ConfigError, DataError

SPLIT = "split"  # the key of a sample that names its split
_PARTS = ("part", "parts")
_CHECKED = 8  # samples of a data set that are asked for twice
SHOWN = 3  # lines of a traceback that a message has


@dataclass(frozen=True)
class Code:
    """What the user names: an object in a file or module, and its arguments."""

    place: str  # absolute path of the file, or the name of the module
    name: str  # name of the object
    args: Mapping[str, Any]  # its arguments
    # How many times a function with the parameters `part` and `parts` is called, or None.
    parts: int | None = None
    names: tuple[str, ...] = ()  # the names of the items of samples that are no dicts

    def data(self) -> Any:
        """Return the data set, made once in each process; None if samples are only iterated."""
        if self.parts is not None:
            return None
        made = _made(
            self.place, self.name, json.dumps(self.args), SourceFile.of(file_of(self.place))
        )
        return made if _is_map(made) else None

    def items(self, what: int | range) -> Iterator[tuple[str, Any]]:
        """Yield what the code gives for a piece, each after its name for messages.

        An item of a data set that raises is an `Unusable`.
        """
        if isinstance(what, range):
            data = self.data()
            for number in what:
                try:
                    yield f"sample {number}", data[number]
                except (Exception, SystemExit) as error:
                    yield f"sample {number}", Unusable(_told(error))
            return
        of = f" of part {what}" if self.parts else ""
        number = -1
        try:
            found = self._called(what)
            if isinstance(found, Mapping) or not hasattr(type(found), "__iter__"):
                kind = type(found).__name__
                raise DataError(
                    f"{self.place}: {self.name} returns a {kind}, no iterable of samples, and no "
                    "data set with __len__ and __getitem__"
                )
            if _is_a(found, "DataLoader"):
                raise DataError(f"{self.place}: {self.name} gives batches; name its data set")
            for number, values in enumerate(found):
                yield f"sample {number}{of}", values
        except (DataError, GeneratorExit):
            raise
        except (Exception, SystemExit) as error:
            where = f"{self.place}: {self.name}, sample {number + 1}{of}"
            raise DataError(f"{where}: {_told(error)}") from None

    def _called(self, part: int) -> Any:
        found = _load(self.place, self.name)
        if not _is_called(found):
            return found
        more = {"part": part, "parts": self.parts} if self.parts else {}
        return found(**self.args, **more)

    def sample(self, values: Any) -> tuple[dict[str, Any], str]:
        """Return the fields of an item, and its split or ""."""
        if isinstance(values, Unusable):
            raise values
        fields = self._named(values)
        has_split = SPLIT in fields
        split = fields.pop(SPLIT, "")
        if not isinstance(split, str) or (has_split and not split):
            raise Unusable(f"its 'split' is {split!r}, no name")
        for name in fields:
            if not isinstance(name, str):
                raise Unusable(f"the field {name!r} has no text for a name")
        try:
            if split:
                check_name(split, "split")
        except DataError as error:
            raise Unusable(str(error)) from None
        return fields, split

    def _named(self, values: Any) -> dict[str, Any]:
        names = self.names
        if isinstance(values, Mapping):
            if missing := [name for name in names if name not in values]:
                raise Unusable(f"it has no {missing[0]!r}, which --fields names")
            chosen = [*names, *([SPLIT] if SPLIT in values else [])] if names else values
            return {name: values[name] for name in chosen}
        if hasattr(values, "_asdict") and not names:
            return dict(values._asdict())
        several = isinstance(values, (tuple, list))
        items = list(values) if several else [values]
        if len(items) != len(names):
            what = f"{type(values).__name__}{f' of {len(items)}' if several else ''}"
            how = f"; --fields names {', '.join(names)}" if names else ""
            raise Unusable(
                f"it is a {what}; a sample is a dict of fields, or --fields NAME,… names its "
                f"items{how}"
            )
        return dict(zip(names, items, strict=True))


def check_same(code: Code, count: int) -> None:
    """Check that a data set gives the same samples when it is asked again."""
    what = range(min(count, _CHECKED))
    for (record, one), (_, other) in zip(code.items(what), code.items(what), strict=True):
        try:
            a, b = (_content(code.sample(values)[0]) for values in (one, other))
        except Unusable:
            continue
        if a != b:
            raise DataError(
                f"{code.place}: {code.name}, {record}: it is another one when it is asked again. "
                "Leave random augmentation out, because only one draw of it would be stored; it "
                "belongs into the training (data.transforms)"
            )


def _content(values: Mapping[str, Any]) -> dict[str, bytes]:
    return {name: fitted(v, field_of(v)).tobytes() for name, v in values.items()}


def place_of(function: str) -> tuple[str, str]:
    """Return the path of a file or the name of a module, and the name of the object in it."""
    place, _, name = function.rpartition(":")
    is_module = all(part.isidentifier() for part in place.split("."))
    if not name or not (place.endswith(".py") or is_module):
        raise ConfigError(f"{function!r} is not FILE.py:NAME or MODULE:NAME")
    return (str(Path(place).absolute()) if place.endswith(".py") else place), name


def file_of(place: str) -> str:
    """Return the file of a module, or the file itself."""
    if place.endswith(".py"):
        return place
    return getattr(_module(place), "__file__", None) or sys.executable


@lru_cache(maxsize=1)
def _made(place: str, name: str, args: str, _: SourceFile) -> Any:
    """Return the object, called with its arguments if it is a function or class."""
    found = _load(place, name)
    try:
        return found(**json.loads(args)) if _is_called(found) else found
    except (Exception, SystemExit) as error:
        raise DataError(f"{place}: {name}: {_told(error)}") from None


def _is_called(found: Any) -> bool:
    return isinstance(found, type) or (callable(found) and not _is_map(found))


def _is_a(found: Any, name: str) -> bool:
    """Return whether an object is of a class of torch, which is not imported for this."""
    return name in (base.__name__ for base in type(found).__mro__)


def _is_map(found: Any) -> bool:
    """Return whether samples can be asked for by their numbers."""
    streams = _is_a(found, "IterableDataset")  # which has both, too
    if streams or isinstance(found, (type, Mapping)) or not hasattr(type(found), "__getitem__"):
        return False
    try:
        return len(found) >= 0
    except (TypeError, NotImplementedError):
        return False


def parts_of(place: str, name: str, args: Mapping[str, Any], pieces: int | None) -> int | None:
    """Return the number of parts; None if the code has no parameters `part` and `parts`."""
    function = _load(place, name)
    if not _is_called(function):
        if args:
            raise ConfigError(f"--arg: {place}: {name} is an object; it takes no arguments")
        return None
    try:
        signature = inspect.signature(function)
        takes = all(part in signature.parameters for part in _PARTS)
        signature.bind(**({"part": 0, "parts": 1} if takes else {}), **args)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{place}: {name} cannot be called: {error}; see --arg") from None
    return (pieces or 1) if takes else None


def _load(place: str, name: str) -> Any:
    """Return the object of a file, imported as a module of its own, or of a module."""
    module = _module(place)
    found = getattr(module, name, None)
    if not (callable(found) or _is_map(found) or hasattr(type(found), "__iter__")):
        own = module.__name__
        known = [k for k, v in vars(module).items() if getattr(v, "__module__", "") == own]
        raise ConfigError(f"{place} has no function {name!r}; it has {', '.join(known) or 'none'}")
    return found


def _module(place: str) -> Any:
    """Import a module, or a file as a module of its own."""
    if is_file := place.endswith(".py"):
        SourceFile.of(place)
    # As with `python FILE.py`, whose neighbours it may import, and with `python -m MODULE`.
    folder = str(Path(place).parent) if is_file else os.getcwd()
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        if not is_file:
            return importlib.import_module(place)
        spec = importlib.util.spec_from_file_location(f"data_prep_python_{Path(place).stem}", place)
        assert spec is not None  # the name ends in .py
        assert spec.loader is not None
        module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
        linecache.checkcache(place)
        spec.loader.exec_module(module)
        return module
    except (Exception, SystemExit) as error:
        missing = error.name or " " if isinstance(error, ModuleNotFoundError) else " "
        if not is_file and place.startswith(missing):
            raise ConfigError(f"there is no module {place!r} here, and none is installed") from None
        raise DataError(f"{place} cannot be imported: {_told(error)}") from None


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
