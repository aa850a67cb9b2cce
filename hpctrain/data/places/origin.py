"""The files of a data set in a folder, or at a URL of an object store (fsspec's).

    >>> origin = Origin("s3://bucket/digits")        # or a folder
    >>> index = index_at("s3://bucket/digits")
    >>> pour(origin, index.shards[0], file.write)         # reads it all and checks its digest

Files are read from beginning to end in large pieces. When a read fails in a way that is typical of
unreliable file systems and networks (EIO, ESTALE, time-outs), the file is opened again and the read
is repeated from the byte that was reached.
"""

import logging
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from io import FileIO
from pathlib import Path
from typing import Any

import xxhash

from hpctrain.base.errors import DataError
from hpctrain.data.shards.index import FILE, Index, Shard, is_url

log = logging.getLogger(__name__)

BLOCK = 8 * 2**20  # bytes per read: some stripes of Lustre, or one request to an object store
RETRY_S = (0.5, 1.0, 2.0, 4.0)  # seconds before each repetition of a read
_DIGEST = re.compile(r"xxh3_128:([0-9a-f]{32})")
_PERMANENT = (PermissionError, IsADirectoryError, NotADirectoryError)

_Sink = Callable[[memoryview], object]


class Origin:
    """The files of the data set at `source`, a folder of any file system or a URL.

    `name` is for messages; `folder` is None if the files must be copied.
    """

    def __init__(self, source: str | Path) -> None:
        self.folder = None if is_url(source) else Path(source)
        self.name = str(source).rstrip("/") if self.folder is None else str(self.folder)
        if self.folder is None:
            self._locate()

    def open(self, path: str) -> Any:
        """Open a file for reading, in binary mode, with `seek`, `readinto` and `close`."""
        if self.folder is None:
            system, root = self._locate()
            # fsspec needs no cache: every byte is read once, in large pieces.
            return system.open(f"{root}/{path}", "rb", block_size=BLOCK, cache_type="none")
        file = FileIO(self.folder / path)
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
        return file

    def _locate(self) -> tuple[Any, str]:
        """Return the file system (fsspec keeps one per process and thread) and the folder in it."""
        try:
            import fsspec
        except ImportError:
            raise DataError(
                f"{self.name}: a data set at a URL needs the package fsspec, and the one of its "
                "protocol: pip install fsspec s3fs (or gcsfs, adlfs, …)"
            ) from None
        try:
            system, root = fsspec.core.url_to_fs(self.name)
        except (ImportError, ValueError) as error:  # fsspec says which package is missing
            raise DataError(f"{self.name} cannot be read: {error}") from None
        return system, str(root).rstrip("/")


def index_at(url: str) -> Index:
    """Read the index of a data set at a URL."""
    origin = Origin(url)
    try:
        content = b"".join(map(bytes, read_blocks(origin, FILE)))
    except FileNotFoundError:
        raise DataError(
            f"{origin.name} has no {FILE}: it is not a finished data set, or not there"
        ) from None
    return Index.loads(content, f"{origin.name}/{FILE}")


def read_blocks(origin: Origin, path: str) -> Iterator[memoryview]:
    """Yield the bytes of a file in order. Each block is valid until the next one is requested.

    A file that is missing is a FileNotFoundError, one that cannot be read a DataError.
    """
    buffer = memoryview(bytearray(BLOCK))
    position, file, name = 0, None, f"{origin.name}/{path}"
    try:
        while True:
            for delay in (*RETRY_S, None):
                try:
                    if file is None:
                        file = origin.open(path)
                        file.seek(position)
                    count = file.readinto(buffer)
                    break
                except FileNotFoundError:
                    raise
                except _PERMANENT as error:
                    raise DataError(f"{name} cannot be read: {error.strerror or error}") from None
                except Exception as error:  # object stores raise their own exceptions
                    where = f"{name}: bytes {position} to {position + BLOCK}"
                    _close(file)
                    file = None
                    if delay is None:
                        raise DataError(
                            f"{where} cannot be read, {len(RETRY_S) + 1} times tried: {error!r}"
                        ) from None
                    log.warning("%s: %r; again in %g s", where, error, delay)
                    time.sleep(delay)
            if not count:
                return
            yield buffer[:count]
            position += count
    finally:
        _close(file)


def pour(origin: Origin, shard: Shard, sink: _Sink) -> None:
    """Read a whole shard, pass each block to `sink`, and at the end check all against the index."""
    digest_of(shard)
    name, size, digest = f"shard {origin.name}/{shard.path}", 0, xxhash.xxh3_128()
    for block in _shard_blocks(origin, shard, name):
        size += len(block)
        if size > shard.bytes:
            most = f"the {shard.bytes} bytes that {FILE} lists"
            raise DataError(f"{name} is changed: it has more than {most}")
        digest.update(block)
        sink(block)
    if size < shard.bytes:
        raise DataError(f"{name} is truncated: it has {size} bytes, {FILE} lists {shard.bytes}")
    found = f"xxh3_128:{digest.hexdigest()}"
    if found != shard.digest:
        lists = f"{FILE} lists {shard.digest}"
        raise DataError(f"{name} is changed: its digest is {found}, {lists}")


def check_digest(path: Path, shard: Shard) -> None:
    """Compare all bytes of a file with the index. The file may have another name than the shard."""
    try:
        pour(Origin(path.parent), replace(shard, path=path.name), lambda block: None)
    except DataError as error:  # a copy has another name
        raise error if path.match(shard.path) else DataError(f"{shard.path}: {error}") from None


def digest_of(shard: Shard) -> str:
    """Return the 32 hexadecimal digits of a shard's digest."""
    match = _DIGEST.fullmatch(shard.digest)
    if match is None:
        raise DataError(
            f"shard {shard.path!r} has the digest {shard.digest!r}; this hpctrain checks "
            "xxh3_128:…, of 32 hexadecimal digits"
        )
    return match[1]


def _shard_blocks(origin: Origin, shard: Shard, name: str) -> Iterator[memoryview]:
    """Yield `read_blocks`, whose errors name the shard. Errors of the consumer are not caught."""
    try:
        yield from read_blocks(origin, shard.path)
    except FileNotFoundError:
        raise DataError(f"{name} is missing; {FILE} lists it") from None


def _close(file: Any) -> None:
    if file is not None:
        with suppress(OSError):  # the file was only read, so nothing is lost
            file.close()
