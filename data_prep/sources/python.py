"""The samples that a Python function of yours gives, for all data that has no command.

    # mine.py
    def samples(folder, part=0, parts=1):
        for path in sorted(Path(folder).glob("*.dat"))[part::parts]:
            yield {"signal": np.fromfile(path, "float32"), "name": path.stem}

    python -m data_prep python mine.py:samples OUT --arg folder=/data --pieces 8 --variable signal

CODE is a function that returns an iterable of samples, such as a generator. FILE.py may import any
module. A data set of torch is taken by

    def pairs():
        mine = MyDataset()
        yield from ({"image": x, "label": y} for x, y in map(mine.__getitem__, range(len(mine))))

A sample is a dict. The first sample decides the schema: arrays and tensors keep dtype and shape;
whole numbers become int64, other numbers float64, bool uint8; text (UTF-8) and bytes become
variable-length uint8; images of Pillow become (channels, height, width), as in `images`. All other
samples have to fit the schema exactly. The key `split` holds the name of the sample's split, unless
--split says something else; --split column:NAME takes it from a field.

The samples have to be the same each time. So leave random augmentation out: it belongs into the
training, and only one draw of it would be stored. The function is called several times: once for
the first 8 samples, at each start, and once for each piece, also in other processes. If it has the
parameters `part` and `parts`, --pieces cuts the work into that many pieces, so that more --workers
can read. The conversion notices changes only of the file.

NumPy's BLAS uses one thread in each process, unless OPENBLAS_NUM_THREADS is set.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from data_prep.formats.user_code import SPLIT, Code, parts_of, place_of, sample_of
from data_prep.options import VARIABLE, Options, pairs, writing
from data_prep.source import BadRecords, InputSource, Piece, SourceFile
from data_prep.sources.stream import Encoded, Stream
from hpctrain.base.errors import ConfigError

ARGUMENTS = f"""
function=CODE
    FILE.py:NAME, a function
--arg KEY=VALUE ...
    an argument of the function; VALUE is JSON (10, 0.5, true, [1, 2]) or else text
--pieces N : int
    call the function N times, with part=0 … N-1 and parts=N (default: once)
{VARIABLE}
{writing("")}
"""


@dataclass(frozen=True)
class _Python(Stream):
    code: Code = field(default_factory=lambda: Code("", "", {}))

    def encoded(self, what: int, reading: BadRecords) -> Iterator[Encoded]:
        """See `Stream`."""
        for record, values in self.code.items(what):
            yield Encoded(self.code.file, record, partial(sample_of, values))


def source(args: argparse.Namespace, options: Options) -> InputSource:
    """Return the samples that a function gives."""
    given, pieces = _values(args.arg), args.pieces
    if pieces is not None and pieces < 1:
        raise ConfigError(f"--pieces {pieces}: at least 1")
    file, name = place_of(args.function)
    files = (SourceFile.of(Path(file)),)
    code = Code(file, name, given, parts_of(file, name, given, pieces))
    return _Python(
        name="python",
        fields={},
        pieces=[Piece(part, files) for part in range(code.parts or 1)],
        identity={"function": name, "args": given, "parts": code.parts},
        about={"from": f"{file}:{name}", "args": given},
        own=SPLIT,
        code=code,
    ).with_fields(options, args.variable, f"{args.function} yields no sample")


def _values(texts: Sequence[str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, text in pairs("--arg", texts, empty=True).items():
        try:
            values[name] = json.loads(text)
        except ValueError:
            values[name] = text
    return values
