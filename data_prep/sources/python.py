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
become (channels, height, width), as in `images`. All other samples have to fit the schema exactly.
The key `split` holds the name of the sample's split, unless --split says something else; --split
column:NAME takes it from a field.

The samples have to be the same each time. So leave random augmentation out: it belongs into the
training, and only one draw of it would be stored. A function is called several times: once for the
first sample, and once for each piece, also in other processes. If it has the parameters `part` and
`parts`, --pieces cuts the work into that many pieces. A data set is made once in each process, and
cut into pieces of a shard; --pieces cuts it into more, so that more --workers can read. The
conversion notices changes only of the file.

NumPy's BLAS uses one thread in each process, unless OPENBLAS_NUM_THREADS is set.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from data_prep.formats.files import ranges
from data_prep.formats.tables.column_choice import listed
from data_prep.formats.user_code import SPLIT, Code, check_same, file_of, parts_of, place_of
from data_prep.options import VARIABLE, Options, pairs, writing
from data_prep.source import BadRecords, InputSource, Piece, SourceFile
from data_prep.sources.stream import Encoded, Stream
from hpctrain.errors import ConfigError

ARGUMENTS = f"""
function=CODE
    FILE.py:NAME or MODULE:NAME, a function, or a data set with __len__ and __getitem__
--fields NAME,…
    names of the items of samples that are no dicts
--arg KEY=VALUE ...
    an argument of the function; VALUE is JSON (10, 0.5, true, [1, 2]) or else text
--pieces N : int
    call the function N times, with part=0 … N-1 and parts=N, or cut the data set into N pieces
    (default: 1, or pieces of a shard)
{VARIABLE}
{writing("")}
"""


@dataclass(frozen=True)
class _Python(Stream):
    code: Code = field(default_factory=lambda: Code("", "", {}))

    def encoded(self, file: str, what: int | range, reading: BadRecords) -> Iterator[Encoded]:
        """See `Stream`."""
        for record, values in self.code.items(what):
            yield Encoded(record, partial(self.code.sample, values))


def source(args: argparse.Namespace, options: Options) -> InputSource:
    """Return the samples that Python code gives."""
    given, pieces = _values(args.arg), args.pieces
    if pieces is not None and pieces < 1:
        raise ConfigError(f"--pieces {pieces}: at least 1")
    place, name = place_of(args.function)
    files = (SourceFile.of(Path(file_of(place))),)
    names = tuple(listed([args.fields or ""]))
    code = Code(place, name, given, parts_of(place, name, given, pieces), names)
    data = code.data()
    if pieces is not None and code.parts is None and data is None:
        raise ConfigError(f"--pieces: {place}: {name} has no parameters part and parts")
    calls = [range(len(data))] if data is not None else range(code.parts or 1)
    found = _Python(
        name="python",
        fields={},
        pieces=[Piece((place, what), files) for what in calls],
        identity={
            "function": name,
            "args": given,
            "parts": code.parts,
            **({"names": list(names), "pieces": pieces} if data is not None or names else {}),
        },
        about={"from": f"{place}:{name}", "args": given},
        own=SPLIT,
        code=code,
    ).with_fields(options, args.variable, f"{args.function} yields no sample")
    if data is None:
        return found
    check_same(code, len(data))
    nbytes = found.sample_bytes
    step = -(-len(data) // pieces) if pieces else max(1, options.shard_bytes // nbytes)
    parts = [range(*ends) for ends in ranges(len(data), step)]
    cut = [Piece((place, part), files, len(part) * nbytes) for part in parts]
    return replace(found, pieces=cut)


def _values(texts: Sequence[str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, text in pairs("--arg", texts, empty=True).items():
        try:
            values[name] = json.loads(text)
        except ValueError:
            values[name] = text
    return values
