"""The samples that Python code of yours gives, for all data that has no command.

    # mine.py
    def samples(folder, part=0, parts=1):
        for path in sorted(Path(folder).glob("*.dat"))[part::parts]:
            yield {"signal": np.fromfile(path, "float32"), "name": path.stem}

    python -m data_prep python mine.py:samples OUT --arg folder=/data --pieces 8 --variable signal
    python -m data_prep python mine.py:Pairs OUT --arg root=/data --fields image,label

CODE is a function that returns an iterable of samples, a data set with `__len__` and `__getitem__`
such as torch's, or a class or function that makes one. FILE.py is a file, MODULE is imported.

A sample is a dict, or a tuple or a single value whose names --fields gives. The first sample
decides the schema: arrays and tensors keep dtype and shape; whole numbers become int64, other
numbers float64, bool uint8; text (UTF-8) and bytes become variable-length uint8; images of Pillow
become (channels, height, width), as in `images`. All other samples have to fit the schema exactly;
--dtype stores floats in fewer bits. The key `split` holds the name of the sample's split, unless
--split says something else; --split column:NAME takes it from a field.

The samples have to be the same each time. So leave random augmentation out: it belongs into the
training, and only one draw of it would be stored. A function is called several times: once for the
first sample, and once for each piece, also in other processes. If it has the parameters `part` and
`parts`, --pieces cuts the work into that many pieces. A data set is made once in each process, and
cut into pieces of a shard; --pieces cuts it into more, so that more --workers can read. The
conversion notices changes only of the file and of each --input.

NumPy's BLAS uses one thread in each process, unless OPENBLAS_NUM_THREADS is set.
"""

import argparse
import importlib
import importlib.util
import inspect
import json
import linecache
import os
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any

from data_prep.formats.samples import Samples, Unusable, field_of, fields_of, fit_all, fitted
from data_prep.formats.tables.column_choice import listed
from data_prep.options import VARIABLE, Options, add_arguments, add_repeated, pairs
from data_prep.source import BadRecords, Block, Piece, Source, SourceFile
from data_prep.writing.piece import Problems
from data_prep.writing.split import ByColumn
from hpctrain.errors import ConfigError, DataError
from hpctrain.shards.field import DTYPES, Field, check_name
from hpctrain.shards.types import Array

SPLIT = "split"
PARTS = ("part", "parts")
CHECKED = 8  # samples of a data set that are asked for twice
SHOWN = 3  # lines of a traceback that a message has


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    parser.add_argument(
        "function",
        metavar="CODE",
        help="FILE.py:NAME or MODULE:NAME, a function, or a data set with __len__ and __getitem__",
    )
    parser.add_argument(
        "--fields", metavar="NAME,…", help="names of the items of samples that are no dicts"
    )
    what = "an argument of the function; VALUE is JSON (10, 0.5, true, [1, 2]) or else text"
    add_repeated(parser, "--arg", "KEY=VALUE", what)
    parser.add_argument(
        "--pieces",
        type=int,
        metavar="N",
        help="call the function N times, with part=0 … N-1 and parts=N, or cut the data set into N "
        "pieces (default: 1, or pieces of a shard)",
    )
    add_repeated(parser, *VARIABLE)
    what = "store a field as this dtype; values that do not fit cannot be used"
    add_repeated(parser, "--dtype", "FIELD=DTYPE", what)
    what = "a file that the function reads; a change in it makes another data set"
    add_repeated(parser, "--input", "FILE", what, Path)
    add_arguments(parser, split="")


def run(args: argparse.Namespace) -> None:
    """Convert the source that the command line names."""
    from data_prep.writing.convert import convert

    given, args.split = args.split, args.split or "train=1"
    options = Options.of(args)
    source = python(
        args.function,
        options,
        args=_values("--arg", args.arg),
        pieces=args.pieces,
        variable=args.variable,
        dtypes={name: str(value) for name, value in _values("--dtype", args.dtype).items()},
        inputs=args.input,
        names=listed([args.fields or ""]),
    )
    if not given and SPLIT in source.columns:
        options = replace(options, split=ByColumn(SPLIT))
    convert(source, args.out, options)


@dataclass(frozen=True)
class Code:
    """What the user names: an object in a file or module, and the arguments that it is called with.

    Attributes:
        place: Absolute path of the file, or the name of the module.
        name: Name of the object.
        args: Its arguments.
        parts: How many times a function with the parameters `part` and `parts` is called, or None.
        names: The names of the items of samples that are no dicts.
    """

    place: str
    name: str
    args: Mapping[str, Any]
    parts: int | None = None
    names: tuple[str, ...] = ()

    def data(self) -> Any:
        """Return the data set, made once in each process; None if samples are only iterated.

        Raises:
            DataError: The code raises.
        """
        if self.parts is not None:
            return None
        made = _made(self.place, self.name, json.dumps(self.args), _stamp(self.place))
        return made if _is_map(made) else None

    def items(self, what: int | range) -> Iterator[tuple[str, Any]]:
        """Yield what the code gives for a piece, each after its name for messages.

        An item of a data set that raises is an `Unusable`.

        Raises:
            DataError: A function raised. The message says where, and at which sample.
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
                what_ = type(found).__name__
                raise DataError(
                    f"{self.place}: {self.name} returns a {what_}, no iterable of samples, and no "
                    "data set with __len__ and __getitem__"
                )
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
        """Return the fields of an item, and its split or "".

        Raises:
            Unusable: The item is no sample.
        """
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
            return {name: values[name] for name in names} if names else dict(values)
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


@dataclass(frozen=True)
class Python(Source):
    """See `python`."""

    unpacks = False
    code: Code = field(default_factory=lambda: Code("", "", {}))
    rounded: frozenset[str] = frozenset()
    column: str = ""

    def read(self, what: int | range, reading: BadRecords) -> Iterator[Block]:
        """See `Source`."""
        file, named = self.code.place, SPLIT in self.columns
        samples = Samples(self.fields, file, keyed=False, columned=bool(self.column))
        for record, values in self.code.items(what):
            try:
                values, split = self.code.sample(values)
                if bool(split) != named:
                    raise Unusable("some samples have a 'split', some have none")
                sample = fit_all(values, self.fields, self.rounded)
            except Unusable as error:
                reading.bad(file, record, str(error))
                continue
            if self.column not in ("", SPLIT):
                split = _text(sample[self.column])
            samples.add(sample, record, column=split)
            if samples.full:
                yield samples.take()
        if len(samples):
            yield samples.take()


def python(
    function: str,
    options: Options,
    *,
    args: Mapping[str, Any] | None = None,
    pieces: int | None = None,
    variable: Sequence[str] = (),
    dtypes: Mapping[str, str] | None = None,
    inputs: Sequence[Path] = (),
    names: Sequence[str] = (),
) -> Source:
    """Make a source of the samples that Python code gives.

    Args:
        function: "FILE.py:NAME" or "MODULE:NAME"; see the module.
        options: The options of the conversion; `on_error`, `split` and `shard_bytes` are used.
        args: Arguments of the function or class.
        pieces: How many times the function is called, each time with another `part`; or into how
            many pieces the data set is cut.
        variable: Fields whose first axis varies in length.
        dtypes: Dtypes to store, by field.
        inputs: Files that the code reads.
        names: The names of the items of samples that are no dicts.

    Raises:
        ConfigError: There is no such code, or it does not have such parameters.
        DataError: The code raises, yields no sample that can be used, or gives other samples when
            it is asked again.
    """
    args, dtypes = args or {}, dtypes or {}
    if pieces is not None and pieces < 1:
        raise ConfigError(f"--pieces {pieces}: at least 1")
    place, name = _place(function)
    files = [SourceFile.of(path) for path in (Path(_file_of(place)), *inputs)]
    for dtype in dtypes.values():
        if dtype not in DTYPES:
            raise ConfigError(f"--dtype {dtype}: allowed are {', '.join(DTYPES)}")
    code = Code(place, name, dict(args), _parts(place, name, args, pieces), tuple(names))
    data = code.data()
    if pieces is not None and code.parts is None and data is None:
        raise ConfigError(f"--pieces: {place}: {name} has no parameters part and parts")
    whole: Sequence[int | range] = (
        [range(len(data))] if data is not None else range(code.parts or 1)
    )
    problems = Problems(options.on_error)
    fields, split, nbytes = {}, "", 1
    for record, values in chain.from_iterable(map(code.items, whole)):
        try:
            values, split = code.sample(values)
            fields = fields_of(values, variable, dtypes)
            first = fit_all(values, fields, frozenset(dtypes))
            nbytes = max(1, sum(value.nbytes for value in first.values()))
            break
        except Unusable as error:
            fields = {}
            problems.bad(place, record, str(error))
    if not fields:
        why = f" that can be used: {problems.found[0]}" if problems.found else ""
        raise DataError(f"{function} yields no sample{why}")
    for option, given in (("--variable", variable), ("--dtype", dtypes)):
        if unknown := sorted(set(given) - set(fields)):
            raise ConfigError(f"{option} {unknown[0]}: the fields are {', '.join(fields)}")
    if data is not None:
        _check_same(code, len(data))
        step = -(-len(data) // pieces) if pieces else max(1, options.shard_bytes // nbytes)
        whole = [range(at, min(at + step, len(data))) for at in range(0, len(data), step)]
    columns = [SPLIT] * bool(split) + [name for name, field in fields.items() if _is_name(field)]
    return Python(
        name="python",
        fields=fields,
        pieces=[
            Piece(what, tuple(files), len(what), len(what) * nbytes)
            if isinstance(what, range)
            else Piece(what, tuple(files))
            for what in whole
        ],
        identity={
            "function": name,
            "args": dict(args),
            "parts": code.parts,
            **({"names": list(names), "pieces": pieces} if data is not None or names else {}),
        },
        about={"from": f"{place}:{name}", "args": dict(args)},
        columns=columns,
        code=code,
        rounded=frozenset(dtypes),
        column=options.split.column if isinstance(options.split, ByColumn) else SPLIT * bool(split),
    )


def _is_name(field: Field) -> bool:
    """Return whether the values of a field can be names of splits: text or whole numbers."""
    if field.variable:
        return field.dtype == "uint8" and not field.shape
    return not field.shape and not field.dtype.startswith("float")


def _text(value: Array) -> str:
    return bytes(value).decode(errors="replace") if value.ndim else str(value.item())


def _check_same(code: Code, count: int) -> None:
    """Check that a data set gives the same samples when it is asked again.

    Raises:
        DataError: It does not.
    """
    what = range(min(count, CHECKED))
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


def _place(function: str) -> tuple[str, str]:
    """Return the path of a file or the name of a module, and the name of the object in it.

    Raises:
        ConfigError: It is neither.
    """
    place, _, name = function.rpartition(":")
    is_module = all(part.isidentifier() for part in place.split("."))
    if not name or not (place.endswith(".py") or is_module):
        raise ConfigError(f"{function!r} is not FILE.py:NAME or MODULE:NAME")
    return (str(Path(place).absolute()) if place.endswith(".py") else place), name


def _file_of(place: str) -> str:
    """Return the file of a module, or the file itself.

    Raises:
        ConfigError: There is no such module.
    """
    if place.endswith(".py"):
        return place
    module = _imported(place)
    return getattr(module, "__file__", None) or sys.executable


def _stamp(place: str) -> SourceFile:
    return SourceFile.of(_file_of(place))


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


def _is_map(found: Any) -> bool:
    """Return whether samples can be asked for by their numbers."""
    kind = type(found)
    if isinstance(found, (type, Mapping)) or "IterableDataset" in map(_name_of, kind.__mro__):
        return False
    return hasattr(kind, "__len__") and hasattr(kind, "__getitem__")


def _name_of(kind: type) -> str:
    return kind.__name__


def _parts(place: str, name: str, args: Mapping[str, Any], pieces: int | None) -> int | None:
    """Return the number of parts; None if the code has no parameters `part` and `parts`.

    Raises:
        ConfigError: The code does not accept its arguments.
    """
    function = _load(place, name)
    if not _is_called(function):
        if args:
            raise ConfigError(f"--arg: {place}: {name} is an object; it takes no arguments")
        return None
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        raise ConfigError(f"{place}: {name} is no function that can be called") from None
    takes = all(part in signature.parameters for part in PARTS)
    given = sorted(set(args) & set(PARTS))
    if given:
        raise ConfigError(f"--arg {given[0]}: --pieces gives it")
    try:
        signature.bind(**args, **({"part": 0, "parts": 1} if takes else {}))
    except TypeError as error:
        raise ConfigError(f"{place}: {name}{signature}: {error}; see --arg") from None
    return (pieces or 1) if takes else None


def _load(place: str, name: str) -> Any:
    """Return the object of a file, imported as a module of its own, or of a module.

    Raises:
        ConfigError: There is no such object or module.
        DataError: Importing it raises.
    """
    module = _executed(place) if place.endswith(".py") else _imported(place)
    found = getattr(module, name, None)
    if not (callable(found) or _is_map(found) or hasattr(type(found), "__iter__")):
        own = module.__name__
        known = [k for k, v in vars(module).items() if getattr(v, "__module__", "") == own]
        raise ConfigError(f"{place} has no function {name!r}; it has {', '.join(known) or 'none'}")
    return found


def _executed(file: str) -> Any:
    module_name = f"data_prep_python_{Path(file).stem}"
    spec = importlib.util.spec_from_file_location(module_name, file)
    assert spec is not None  # the name ends in .py
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    folder = str(Path(file).parent)
    if folder not in sys.path:  # the file imports its neighbours, as with `python FILE.py`
        sys.path.insert(0, folder)
    sys.modules[module_name] = module
    linecache.checkcache(file)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise DataError(f"{file} cannot be imported: {_told(error)}") from None
    return module


def _imported(name: str) -> Any:
    if os.getcwd() not in sys.path:  # as with `python -m`
        sys.path.insert(0, os.getcwd())
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if not name.startswith(error.name or " "):
            raise DataError(f"{name} cannot be imported: {_told(error)}") from None
        raise ConfigError(f"there is no module {name!r} here, and none is installed") from None
    except (Exception, SystemExit) as error:
        raise DataError(f"{name} cannot be imported: {_told(error)}") from None


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


def _values(option: str, texts: Sequence[str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, text in pairs(option, texts, empty=True).items():
        try:
            values[name] = json.loads(text)
        except ValueError:
            values[name] = text
    return values
