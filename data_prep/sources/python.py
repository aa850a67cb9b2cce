"""The samples that a Python function of yours yields, for all data that has no command.

    # mine.py
    def samples(folder, part=0, parts=1):
        for path in sorted(Path(folder).glob("*.dat"))[part::parts]:
            yield {"signal": np.fromfile(path, "float32"), "name": path.stem}

    python -m data_prep python mine.py:samples OUT --arg folder=/data --pieces 8 --variable signal

A sample is a dict. The first sample decides the schema: arrays keep dtype and shape; whole numbers
become int64, other numbers float64, bool uint8; text (UTF-8) and bytes become variable-length
uint8. All other samples have to fit the schema exactly; --dtype stores floats in fewer bits. The
key `split` holds the name of the sample's split, unless --split says something else.

The function is called several times: once for the first sample, and once for each piece, also in
other processes. It has to yield the same samples each time. If it has the parameters `part` and
`parts`, --pieces cuts the work into that many pieces. The conversion notices changes only of
FILE.py and of each --input.

NumPy's BLAS uses one thread in each process, unless OPENBLAS_NUM_THREADS is set.
"""

import argparse
import importlib.util
import inspect
import json
import linecache
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

from data_prep.formats.samples import Samples, Unusable, fields_of, fit_all
from data_prep.options import VARIABLE, Options, add_arguments, add_repeated, pairs
from data_prep.source import BadRecords, Block, Piece, Source, SourceFile
from data_prep.writing.piece import Problems
from data_prep.writing.split import ByColumn
from hpctrain.errors import ConfigError, DataError
from hpctrain.shards.field import DTYPES, check_name

SPLIT = "split"
PARTS = ("part", "parts")
SHOWN = 3  # lines of a traceback that a message has


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    parser.add_argument(
        "function", metavar="FILE.py:FUNCTION", help="a function that returns an iterable of dicts"
    )
    what = "an argument of the function; VALUE is JSON (10, 0.5, true, [1, 2]) or else text"
    add_repeated(parser, "--arg", "KEY=VALUE", what)
    parser.add_argument(
        "--pieces",
        type=int,
        metavar="N",
        help="call the function N times, with part=0 … N-1 and parts=N (default: 1)",
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
    )
    if not given and source.columns:
        options = replace(options, split=ByColumn(SPLIT))
    convert(source, args.out, options)


@dataclass(frozen=True)
class Python(Source):
    """See `python`."""

    unpacks = False
    file: str = ""
    function: str = ""
    args: Mapping[str, Any] = field(default_factory=dict)
    parts: int | None = None
    rounded: frozenset[str] = frozenset()

    def read(self, what: int, reading: BadRecords) -> Iterator[Block]:
        """See `Source`."""
        samples = Samples(self.fields, self.file, keyed=False, columned=bool(self.columns))
        calls = _call(self.file, self.function, self.args, what, self.parts)
        for record, values in calls:
            try:
                values, split = _sample(values)
                if bool(split) != bool(self.columns):
                    raise Unusable("some samples have a 'split', some have none")
                sample = fit_all(values, self.fields, self.rounded)
            except Unusable as error:
                reading.bad(self.file, record, str(error))
                continue
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
) -> Source:
    """Make a source of the samples that a function yields.

    Args:
        function: "FILE.py:FUNCTION"; the function returns an iterable of dicts.
        options: The options of the conversion; `on_error` is used.
        args: Arguments of the function.
        pieces: How many times the function is called, each time with another `part`.
        variable: Fields whose first axis varies in length.
        dtypes: Dtypes to store, by field.
        inputs: Files that the function reads.

    Raises:
        ConfigError: There is no such function, or it does not have such parameters.
        DataError: The function raises, or yields no sample that can be used.
    """
    args, dtypes = args or {}, dtypes or {}
    file, _, name = function.rpartition(":")
    if not file.endswith(".py") or not name:
        raise ConfigError(f"{function!r} is not FILE.py:FUNCTION")
    if pieces is not None and pieces < 1:
        raise ConfigError(f"--pieces {pieces}: at least 1")
    files = [SourceFile.of(path) for path in (Path(file).absolute(), *inputs)]
    file = files[0].path
    for dtype in dtypes.values():
        if dtype not in DTYPES:
            raise ConfigError(f"--dtype {dtype}: allowed are {', '.join(DTYPES)}")
    parts = _parts(file, name, args, pieces)
    problems = Problems(options.on_error)
    fields, split = {}, ""
    calls = (_call(file, name, args, part, parts) for part in range(parts or 1))
    for record, values in chain.from_iterable(calls):
        try:
            values, split = _sample(values)
            fields = fields_of(values, variable, dtypes)
            fit_all(values, fields, frozenset(dtypes))
            break
        except Unusable as error:
            fields = {}
            problems.bad(file, record, str(error))
    if not fields:
        why = f" that can be used: {problems.found[0]}" if problems.found else ""
        raise DataError(f"{function} yields no sample{why}")
    for option, names in (("--variable", variable), ("--dtype", dtypes)):
        if unknown := sorted(set(names) - set(fields)):
            raise ConfigError(f"{option} {unknown[0]}: the fields are {', '.join(fields)}")
    return Python(
        name="python",
        fields=fields,
        pieces=[Piece(part, tuple(files)) for part in range(parts or 1)],
        identity={"function": name, "args": dict(args), "parts": parts},
        about={"from": f"{file}:{name}", "args": dict(args)},
        columns=(SPLIT,) if split else (),
        file=file,
        function=name,
        args=args,
        parts=parts,
        rounded=frozenset(dtypes),
    )


def _sample(values: Any) -> tuple[dict[str, Any], str]:
    """Return the fields of a sample, and its split or "".

    Raises:
        Unusable: The value is not a sample.
    """
    if not isinstance(values, Mapping):
        raise Unusable(f"it is a {type(values).__name__}; a sample is a dict of fields")
    fields = dict(values)
    split = fields.pop(SPLIT, "")
    if not isinstance(split, str) or (SPLIT in values and not split):
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


def _parts(file: str, name: str, args: Mapping[str, Any], pieces: int | None) -> int | None:
    """Return the number of parts; None if the function has no parameters `part` and `parts`.

    Raises:
        ConfigError: The function does not accept its arguments.
    """
    function = _load(file, name)
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        raise ConfigError(f"{file}: {name} is no function that can be called") from None
    takes = all(part in signature.parameters for part in PARTS)
    if pieces is not None and not takes:
        raise ConfigError(f"--pieces: {file}: {name}{signature} has no parameters part and parts")
    given = sorted(set(args) & set(PARTS))
    if given:
        raise ConfigError(f"--arg {given[0]}: --pieces gives it")
    try:
        signature.bind(**args, **({"part": 0, "parts": 1} if takes else {}))
    except TypeError as error:
        raise ConfigError(f"{file}: {name}{signature}: {error}; see --arg") from None
    return (pieces or 1) if takes else None


def _load(file: str, name: str) -> Callable[..., Any]:
    """Import the file as a module of its own, and return the function.

    Raises:
        ConfigError: The file has no such function.
        DataError: Importing the file raises.
    """
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
    function = getattr(module, name, None)
    if not callable(function):
        known = [k for k, v in vars(module).items() if getattr(v, "__module__", "") == module_name]
        raise ConfigError(f"{file} has no function {name!r}; it has {', '.join(known) or 'none'}")
    return function  # type: ignore[no-any-return]


def _call(
    file: str, name: str, args: Mapping[str, Any], part: int, parts: int | None
) -> Iterator[tuple[str, Any]]:
    """Yield the values that the function yields, each after its name for messages.

    Raises:
        DataError: The function raised. The message says where, and at which sample.
    """
    function = _load(file, name)
    of = f" of part {part}" if parts else ""
    number = -1
    try:
        found = function(**args, **({"part": part, "parts": parts} if parts else {}))
        if isinstance(found, Mapping) or not hasattr(type(found), "__iter__"):
            what = type(found).__name__
            raise DataError(f"{file}: {name} returns a {what}, no iterable of dicts")
        for number, values in enumerate(found):
            yield f"sample {number}{of}", values
    except (DataError, GeneratorExit):
        raise
    except (Exception, SystemExit) as error:
        raise DataError(f"{file}: {name}, sample {number + 1}{of}: {_told(error)}") from None


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
