"""A check that a NetCDF file of the classic format is complete.

The NetCDF library (4.10) returns zeros for values behind the end of a file that was cut off, and
has no function that says how long a file should be. The layout is that of "The NetCDF Classic
Format Specification": a header of big-endian numbers, then the variables.
"""

import math
import os
from typing import IO

from hpctrain.errors import DataError

SIZES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 4, 6: 8, 7: 1, 8: 2, 9: 4, 10: 8, 11: 8}  # bytes, by type
MOST = 2**24  # bytes of a name or of an attribute's values; more is taken for damage


def check_whole(path: str) -> None:
    """Check that a file is as long as its header says. A file of another format passes."""
    with open(path, "rb") as file:
        magic = file.read(4)
        if magic[:3] != b"CDF" or magic[3:] not in (b"\x01", b"\x02", b"\x05"):
            return
        found = os.stat(file.fileno()).st_size
        try:
            needed = _Header(file, magic[3]).end()
        except (EOFError, KeyError, IndexError, OverflowError):
            raise DataError(f"{path} is truncated or damaged in its header") from None
    if found < needed:
        raise DataError(
            f"{path} is truncated: its header says {needed:,} bytes, {found:,} are there"
        )


class _Header:
    def __init__(self, file: IO[bytes], version: int) -> None:
        self._file = file
        self._count = 8 if version == 5 else 4  # bytes of a count
        self._offset = 4 if version == 1 else 8  # bytes of a byte offset

    def end(self) -> int:
        """Return the byte offset at which the last variable ends."""
        records = self._number(self._count)
        if records == 256**self._count - 1:  # written as a stream: the number is not known
            records = 0
        dims = []
        for _ in range(self._list()):
            self._text()
            dims.append(self._number(self._count))
        self._attributes()
        ends, per_record, lasts = [self._file.tell()], [], []
        for _ in range(self._list()):
            self._text()
            shape = [dims[self._number(self._count)] for _ in range(self._number(self._count))]
            self._attributes()
            size = SIZES[self._number(4)]
            self._number(self._count)  # vsize, which is wrong for large variables
            begin = self._number(self._offset)
            if shape and shape[0] == 0:  # the record dimension
                one = size * math.prod(shape[1:])
                per_record.append(one)
                lasts.append(begin + one)
            else:
                ends.append(begin + size * math.prod(shape))
        # Each variable of a record is padded to 4 bytes, unless it is the only one.
        step = (
            per_record[0] if len(per_record) == 1 else sum(-(-one // 4) * 4 for one in per_record)
        )
        if records:
            ends += [last + (records - 1) * step for last in lasts]
        return max(ends)

    def _number(self, size: int) -> int:
        return int.from_bytes(self._read(size))

    def _list(self) -> int:
        self._number(4)  # the tag of the list
        return self._number(self._count)

    def _text(self) -> None:
        self._padded(self._number(self._count))

    def _attributes(self) -> None:
        for _ in range(self._list()):
            self._text()
            size = SIZES[self._number(4)]
            self._padded(self._number(self._count) * size)

    def _padded(self, size: int) -> None:
        if size > MOST:
            raise OverflowError
        self._read(-(-size // 4) * 4)

    def _read(self, size: int) -> bytes:
        content = self._file.read(size)
        if len(content) < size:
            raise EOFError
        return content
