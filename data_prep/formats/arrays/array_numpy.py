"""Arrays in .npy and .npz files; see `array_base`."""

import math
import os
import struct
import zipfile
from contextlib import ExitStack
from functools import lru_cache, partial
from typing import Any

import numpy as np

from data_prep.formats.arrays.array_base import OpenedArray, Where, check_dtype, choose, reading
from data_prep.source import SourceFile
from hpctrain.base.errors import ConfigError, DataError
from hpctrain.data.shards.types import Array

_END_BYTES = 22 + 2**16  # size of the end of a zip file at most: its record and a comment
_MANY = 2**16 - 1  # what a zip file says if it has this number of members or more


def open_npy(where: Where, opened: ExitStack) -> OpenedArray:
    """Open a .npy file, which is mapped into memory."""
    if where.key:
        raise ConfigError(f"{where}: a .npy file holds one array, and takes no key")
    array = np.lib.format.open_memmap(where.path, "r")
    check_dtype(where, array.dtype)
    end = int(array.offset) + array.nbytes
    _check_size(where, array.nbytes, os.stat(where.path).st_size - int(array.offset))

    def problem(*_: int) -> str:  # a mapped page that is no longer there would end the process
        cut = os.stat(where.path).st_size < end
        return "was cut off while it was being read" if cut else ""

    mixed = not array.flags.c_contiguous
    return OpenedArray(array.dtype, array.shape, lambda: array, problem, mixed=mixed)


def open_npz(where: Where, opened: ExitStack) -> OpenedArray:
    """Open a member of a .npz file, which was in memory when it was written, and is so again."""
    key = choose(where, dict.fromkeys(npz_names(where.path), ""))
    of = np.lib.format
    with zipfile.ZipFile(where.path) as archive, archive.open(f"{key}.npy") as member:
        first = of.read_magic(member) == (1, 0)
        read: Any = of.read_array_header_1_0 if first else of.read_array_header_2_0
        shape, _, dtype = read(member)
        size = archive.getinfo(member.name).file_size - member.tell()
    check_dtype(where, dtype)
    # NumPy reads no more than the header says, and then nothing compares the CRC-32.
    _check_size(where, dtype.itemsize * math.prod(shape), size)
    return OpenedArray(dtype, shape, partial(_loaded, key, SourceFile.of(where.path)))


def _check_size(where: Where, needed: int, found: int) -> None:
    """Compare the bytes of an array with those that are there."""
    if needed != found:
        raise DataError(
            f"{where}: its header says {needed:,} bytes of data, {found:,} are there; a file that "
            "is whole has one array"
        )


def npz_names(path: str) -> list[str]:
    """Return the keys of an .npz."""
    SourceFile.of(path)
    with reading(Where(path)):
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
        listed = _listed_members(path)
    if listed not in (_MANY, len(names)):  # a damaged length can hide members
        raise DataError(f"{path} is damaged: it says {listed} arrays, and lists {len(names)}")
    keys = [name.removesuffix(".npy") for name in names if name.endswith(".npy")]
    if {"data", "shape", "format"} <= set(keys):
        raise DataError(
            f"{path} is a sparse matrix of SciPy: `numpy.save('x.npy', scipy.sparse.load_npz(FILE)"
            ".toarray())` in Python stores it as an array"
        )
    if twice := {key for key in keys if keys.count(key) > 1}:
        raise DataError(f"{path} holds {min(twice)!r} twice")
    if other := [name for name in names if not name.endswith(".npy")]:
        raise DataError(f"{path} holds {other[0]!r}, which is not an array")
    return keys


def _listed_members(path: str) -> int:
    """Return the number of members that the end of a zip file says."""
    with open(path, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - _END_BYTES))
        end = file.read()
    (count,) = struct.unpack_from("<H", end, end.rindex(b"PK\5\6") + 10)
    return int(count)


@lru_cache(maxsize=8)
def _loaded(key: str, file: SourceFile) -> Array:
    """Read a whole array, so that `zipfile` compares its CRC-32."""
    with np.load(file.path, allow_pickle=False) as archive:
        array: Array = archive[key]
    return array
