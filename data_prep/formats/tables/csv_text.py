"""The text of CSV files, which is checked as it is read, and integers that a float would round."""

import codecs
import io
from collections.abc import Iterator
from typing import Any, BinaryIO

import numpy as np


class NotTextError(Exception):
    """A byte is not possible in UTF-8 text."""


class Utf8(io.RawIOBase):
    """The text of a stream; another encoding raises NotTextError.

    `quotes` is their number so far: Arrow accepts a quote that is still open at the end.
    """

    def __init__(self, stream: BinaryIO) -> None:
        self._stream, self._at, self.quotes = stream, 0, 0
        self._decoder = codecs.getincrementaldecoder("utf-8")()

    def readable(self) -> bool:
        """Return True."""
        return True

    def read(self, size: int = -1, /) -> bytes:
        """Return `size` bytes, or fewer at the end."""
        raw = self._stream.read(size)
        waiting, zero = self._decoder.getstate()[0], raw.find(b"\0")
        if zero >= 0:  # as UTF-16 has it without a byte order mark
            raise NotTextError(f"byte {self._at + zero:,} is 0x00")
        try:
            if waiting or not raw.isascii():
                self._decoder.decode(raw, final=not raw)
        except UnicodeDecodeError as error:
            place = self._at - len(waiting) + error.start
            raise NotTextError(f"byte {place:,} is 0x{error.object[error.start]:02x}") from None
        self._at += len(raw)
        self.quotes += raw.count(b'"')
        return raw


_EXACT = 2.0**53  # floats below this are exact if they are whole numbers
_WHOLE = r"^\s*[+-]?\d{16,}\s*$"


def may_be_rounded(batch: Any) -> bool:
    """Return whether columns of floats have values that are not exact if they were integers."""
    if not batch.num_rows or not batch.num_columns:
        return False
    matrix = batch.to_tensor(null_to_nan=True, row_major=False).to_numpy()
    return bool((np.abs(matrix) >= _EXACT).any())


def rounded(texts: Any) -> Iterator[tuple[int, str]]:
    """Yield the place and the text of each integer of an array of texts that differs as a float."""
    from pyarrow import compute

    whole = compute.match_substring_regex(texts, _WHOLE).fill_null(False)
    for place in np.flatnonzero(whole.to_numpy(zero_copy_only=False)).tolist():
        text = texts[place].as_py().strip()
        number = float(text)
        if len(text) > 310 or not np.isfinite(number) or int(text) != int(number):
            yield place, text
