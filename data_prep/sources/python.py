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
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

from data_prep.formats.samples import Samples, Unusable, fields_of, fit_all
from data_prep.formats.tables.column_choice import listed
from data_prep.formats.user_code import SPLIT, Code, check_same, file_of, parts_of, place_of
from data_prep.options import VARIABLE, Options, add_arguments, add_repeated, pairs
from data_prep.source import BadRecords, Block, Piece, Source, SourceFile
from data_prep.writing.piece import Problems
from data_prep.writing.split import ByColumn
from hpctrain.errors import ConfigError, DataError
from hpctrain.shards.field import DTYPES, Field
from hpctrain.shards.types import Array


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
    """Make a source of the samples that Python code gives."""
    args, dtypes = args or {}, dtypes or {}
    if pieces is not None and pieces < 1:
        raise ConfigError(f"--pieces {pieces}: at least 1")
    place, name = place_of(function)
    files = [SourceFile.of(path) for path in (Path(file_of(place)), *inputs)]
    for dtype in dtypes.values():
        if dtype not in DTYPES:
            raise ConfigError(f"--dtype {dtype}: allowed are {', '.join(DTYPES)}")
    code = Code(place, name, dict(args), parts_of(place, name, args, pieces), tuple(names))
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
    if data is not None:
        check_same(code, len(data))
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


def _values(option: str, texts: Sequence[str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, text in pairs(option, texts, empty=True).items():
        try:
            values[name] = json.loads(text)
        except ValueError:
            values[name] = text
    return values
