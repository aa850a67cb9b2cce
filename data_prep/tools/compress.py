"""Show how small gzip and xz make a field: a yardstick for the bits per byte of language models.

The samples of a split are compressed in their order, as one file (gzip -9, xz -9e). Bits per byte
are 8 times the compressed size, divided by the size.

    python -m data_prep compress data/stdlib --field text --split val
"""

import argparse
import json
import lzma
import zlib
from collections.abc import Iterable
from typing import Any

from data_prep.datasets.dataset import DataSet
from data_prep.options import DIR
from data_prep.show import console
from hpctrain.shards.ragged import Ragged

ARGUMENTS = f"""{DIR}
--field, -f NAME = text
    the field
--split NAME = val
    the split
--json
    print JSON
"""


def run(args: argparse.Namespace) -> None:
    """Run the command."""
    data = DataSet(args.folder)
    (split,) = data.splits(args.split)
    fields = data.fields([args.field])
    blocks = (rows[args.field] for rows in data.blocks(split, fields))
    nbytes, sizes = compressed(
        (rows.values if isinstance(rows, Ragged) else rows).tobytes() for rows in blocks
    )
    bits = {name: 8 * size / max(1, nbytes) for name, size in sizes.items()}
    if args.json:
        print(json.dumps({"bytes": nbytes, "compressed": sizes, "bits_per_byte": bits}))
        return
    print(f"{args.folder}, split {args.split}, field {args.field}: {console.size(nbytes)}")
    for name, size in sizes.items():
        print(f"  {name:<8} {console.size(size):>9}  {bits[name]:.4f} bits per byte")


def compressed(parts: Iterable[bytes]) -> tuple[int, dict[str, int]]:
    """Return the bytes of all parts, and the bytes of what each compressor makes of them."""
    compressors: dict[str, Any] = {
        "gzip -9": zlib.compressobj(9, wbits=31),
        "xz -9e": lzma.LZMACompressor(preset=9 | lzma.PRESET_EXTREME),
    }
    nbytes, sizes = 0, dict.fromkeys(compressors, 0)
    for part in parts:
        nbytes += len(part)
        for name, compressor in compressors.items():
            sizes[name] += len(compressor.compress(part))
    for name, compressor in compressors.items():
        sizes[name] += len(compressor.flush())
    return nbytes, sizes
