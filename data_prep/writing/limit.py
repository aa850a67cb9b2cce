"""The most that a conversion may write: a small file may unpack to more than a disk holds.

A Parquet file of 226 KB can hold 5 GB, because the same value is stored once. Real compressed data
stays below GROWTH: deflate, in gzip and PNG, cannot do more than 1,032 to 1.
"""

from data_prep.options import Options
from data_prep.show.console import size
from data_prep.source import Source
from hpctrain.errors import DataError

GROWTH = 1000
FLOOR = 2**30  # bytes; less does no harm


class OutputLimit:
    """Counts what a conversion reads as samples, and stops it above the limit."""

    def __init__(self, source: Source, options: Options) -> None:
        files = {file.path: file.size for piece in source.pieces for file in piece.files}
        self._source = sum(files.values())
        self._given = options.max_output
        self._most = options.max_output
        if self._most is None and source.unpacks and files:
            self._most = max(FLOOR, GROWTH * self._source)
        self._done = 0

    def add(self, nbytes: int) -> None:
        """Count bytes of samples."""
        self._done += nbytes
        if self._most is None or self._done <= self._most:
            return
        why = "" if self._given else f", {GROWTH} times the source of {size(self._source)}"
        if not self._given and self._most == FLOOR:
            why = f", the limit for a source of {size(self._source)}"
        raise DataError(
            f"the samples are more than {size(self._most)}{why}: is the source a file that unpacks "
            "to nearly anything? If they are right, --max-output SIZE allows more, and the same "
            "command goes on"
        )
