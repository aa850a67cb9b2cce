"""Provides an object store whose reads can fail: `faulty://FOLDER` reads a folder by fsspec."""

import os
from collections.abc import Callable
from io import FileIO
from typing import Any

import fsspec

Fault = Callable[[str, int, bytes], bytes]


class FaultyStore(fsspec.AbstractFileSystem):
    """Passes the bytes it reads through `fault(path, position, data)`, which may raise or wait.

    If STORE_LOG is set, it names a file that gets one line for each file that any process opens.
    """

    protocol = "faulty"
    cachable = False
    fault: Fault = staticmethod(lambda path, position, data: data)

    def open(self, path: str, mode: str = "rb", **options: Any) -> "_File":
        if log := os.environ.get("STORE_LOG"):
            with open(log, "a") as file:
                file.write(os.path.basename(path) + "\n")
        return _File(self._strip_protocol(path))


class _File:
    def __init__(self, path: str) -> None:
        self._path, self._file = path, FileIO(path)

    def readinto(self, buffer: memoryview) -> int:
        position = self._file.tell()
        data = FaultyStore.fault(self._path, position, self._file.read(len(buffer)))
        buffer[: len(data)] = data
        return len(data)

    def seek(self, position: int) -> None:
        self._file.seek(position)

    def close(self) -> None:
        self._file.close()


fsspec.register_implementation("faulty", FaultyStore, clobber=True)
