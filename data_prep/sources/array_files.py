"""An array in a file, read by ranges of rows: memory for what is asked, whatever the file's size.

.npy, .npz and raw numbers here; HDF5, NetCDF and Zarr in `array_containers`. Nothing is mapped: a
file that is cut off while it is read is an error then, not the end of the process.
"""

import glob
import math
import os
import re
import zipfile
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import IO, Any

import numpy as np

from hpctrain.data.ragged import Array
from hpctrain.errors import ConfigError, DataError

HDF5 = (".h5", ".hdf5", ".hdf", ".he5", ".h5ad", ".mat")
NETCDF = (".nc", ".nc4", ".cdf", ".netcdf")
ZARR = (".zarr", ".zarr.zip")
FORMS = (
    "FILE.npy, FILE.npz:KEY, FILE.h5:/PATH, FILE.nc:VARIABLE, FILE.zarr:PATH, or for raw numbers "
    "FILE:DTYPE:SHAPE such as u.bin:float32:3x64x64"
)
SLAB_BYTES = 128 * 2**20  # rows that are stored together are read together, up to so much


@dataclass(frozen=True, slots=True)
class Where:
    """An array in a file.

    Attributes:
        path: Of the file, or the folder of a Zarr store.
        key: What is behind the colon: the array in the file, or "DTYPE:SHAPE:SKIP".
    """

    path: str
    key: str = ""

    def __str__(self) -> str:
        return f"{self.path}:{self.key}" if self.key else self.path

    @property
    def kind(self) -> str:
        """npy, npz, hdf5, netcdf, zarr or raw, as the name ends."""
        name = self.path.rstrip("/").lower()
        for kind, endings in (("hdf5", HDF5), ("netcdf", NETCDF), ("zarr", ZARR)):
            if name.endswith(endings):
                return kind
        return name[-3:] if name.endswith((".npy", ".npz")) else "raw"


def parse_where(text: str) -> list[Where]:
    """Read FILE or FILE:KEY; FILE may be a pattern, whose files come in natural order.

    Raises:
        ConfigError: A pattern without files.
    """
    cuts = [len(text), *(i for i in reversed(range(len(text))) if text[i] == ":")]
    for cut in cuts:  # the longest that is there: names may have colons
        if cut and os.path.exists(text[:cut]):
            return [Where(text[:cut], text[cut + 1 :])]
    for cut in cuts:
        if found := glob.glob(text[:cut], recursive=True) if glob.has_magic(text[:cut]) else []:
            return [Where(path, text[cut + 1 :]) for path in sorted(found, key=natural)]
    path, _, key = text.partition(":")
    if glob.has_magic(path):
        raise ConfigError(f"no file matches {path!r}")
    return [Where(path, key)]


def natural(text: str) -> tuple[Any, ...]:
    """A key that sorts t2 before t10."""
    parts = re.findall(r"([0-9]+)|([^0-9]+)", text)
    return *((int(number or -1), other) for number, other in parts), text


class ArrayFile(ABC):
    """An open array. Use it in a `with`.

    Args:
        where: For messages.
        dtype: As stored.
        shape: As stored.
        axis: That is the sample.
        chunk: Rows that are stored together, so that one costs as much to read as all.

    Attributes:
        dtype: As stored.
        shape: (samples, *sample).
        attributes: What the file says of it.

    Raises:
        DataError: A dtype or shape that has no rows of numbers.
        ConfigError: It has no such axis.
    """

    def __init__(
        self, where: Where, dtype: Any, shape: Sequence[int], axis: int, chunk: int = 1
    ) -> None:
        _check_dtype(where, dtype)
        if not shape:
            raise DataError(f"{where} is a single number; an axis has to be the sample")
        if not -len(shape) <= axis < len(shape):
            raise ConfigError(f"--axis {axis}: {where} has {len(shape)} axes, {tuple(shape)}")
        axis %= len(shape)
        self.where, self.dtype, self.axis = where, np.dtype(dtype), axis
        self.shape = (shape[axis], *shape[:axis], *shape[axis + 1 :])
        self.attributes: Mapping[str, Any] = {}
        row = max(1, self.dtype.itemsize * math.prod(self.shape[1:]))
        self._chunk = chunk if chunk * row <= SLAB_BYTES else 1
        self._slab: tuple[int, Array] | None = None

    def rows(self, start: int, stop: int) -> Array:
        """Return (stop - start, *sample); do not change it.

        Raises:
            DataError: They cannot be read.
        """
        if self._chunk == 1:
            return self._rows(start, stop)
        if self._slab is not None:
            first, slab = self._slab
            if first <= start and stop <= first + len(slab):
                return slab[start - first : stop - first]
        first = start - start % self._chunk
        slab = self._rows(first, min(self.shape[0], -(-stop // self._chunk) * self._chunk))
        self._slab = first, slab
        return slab[start - first : stop - first]

    @abstractmethod
    def _rows(self, start: int, stop: int) -> Array: ...

    def files(self, start: int, stop: int) -> Iterable[str]:
        """The files that these rows are read from."""
        return (self.where.path,)

    def close(self) -> None:  # noqa: B027
        """Let go of the file, if it is held."""

    def __enter__(self) -> "ArrayFile":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_array(where: Where, axis: int = 0, *, external: bool = False) -> ArrayFile:
    """Open an array.

    Args:
        where: It.
        axis: That is the sample.
        external: Links of an HDF5 file may lead to other files.

    Raises:
        DataError: It is missing, damaged, or not an array of numbers.
        ConfigError: `where` does not say which array, or the axis is not there.
    """
    from data_prep.sources import array_containers

    try:
        match where.kind:
            case "npy":
                if where.key:
                    raise ConfigError(f"{where}: a .npy file holds one array, and takes no key")
                with open(where.path, "rb") as file:
                    return _npy(where, file, axis, 0, os.stat(file.fileno()).st_size)
            case "npz":
                return _npz(where, axis)
            case "raw":
                return _raw(where, axis)
            case kind:
                return array_containers.open_container(kind, where, axis, external)
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise unreadable(where, error) from None


def unreadable(where: Where, error: Exception) -> DataError:
    """What to tell of a file that a library cannot read."""
    if isinstance(error, OSError) and error.strerror and error.errno:
        return DataError(f"{where.path} cannot be read: {os.strerror(error.errno)}")
    text = " ".join(str(error).split()) or type(error).__name__
    what = {"npy": "NumPy", "npz": "NumPy", "hdf5": "HDF5", "netcdf": "NetCDF", "zarr": "Zarr"}
    return DataError(f"{where} is not readable as {what.get(where.kind, 'raw')}: {text}")


def choose(where: Where, names: Mapping[str, str]) -> str:
    """The array's name in a file; without a key it must be the only one.

    Args:
        where: What was asked for.
        names: The arrays that are there, and what each is, such as "float32 (10, 3)".

    Raises:
        ConfigError: With all names, and an example.
    """
    if where.key in names:
        return where.key
    if not names:
        raise DataError(f"{where.path} holds no arrays")
    if not where.key and len(names) == 1:
        return next(iter(names))
    shown = [f"{name} {what}".rstrip() for name, what in names.items()]
    more = f"; and {len(shown) - 20} more" if len(shown) > 20 else ""
    problem = f"has no array {where.key!r}" if where.key else "holds several arrays"
    name = next(iter(names))
    field = re.sub(r"[^A-Za-z0-9_.-]", "_", name.rpartition("/")[2]) or "x"
    raise ConfigError(
        f"{where.path} {problem}; there are: {'; '.join(shown[:20])}{more}. For example: "
        f"--field {field}={where.path}:{name}"
    )


def _check_dtype(where: Where, dtype: Any) -> None:
    """Refuse what are not numbers.

    Raises:
        DataError: With what to do instead.
    """
    kind = dtype.kind if isinstance(dtype, np.dtype) else "T"
    if kind in "biuf":
        return
    if kind == "V" and dtype.names:
        what = f"structured ({', '.join(dtype.names)}): save each of them as an array"
    else:
        what = {
            "c": f"{dtype}: store the real and the imaginary part as two fields",
            "O": "dtype object, which holds Python objects: save arrays of numbers",
            "S": "text: `python -m data_prep table` or `text` takes it",
            "U": "text: `python -m data_prep table` or `text` takes it",
            "T": "text: `python -m data_prep table` or `text` takes it",
            "M": f"{dtype}: save it as int64",
            "m": f"{dtype}: save it as int64",
        }.get(kind, f"dtype {dtype}: save arrays of numbers")
    raise DataError(f"{where} is {what}")


class Flat(ArrayFile):
    """Numbers end to end in a file: .npy, an uncompressed member of .npz, raw."""

    def __init__(
        self,
        where: Where,
        dtype: Any,
        shape: tuple[int, ...],
        axis: int,
        offset: int,
        fortran: bool = False,
    ) -> None:
        super().__init__(where, dtype, shape, axis)
        # As rows of the file's own order: `outer` runs, in each the samples, `inner` of each.
        self._reversed = fortran
        self._shape = shape[::-1] if fortran else shape
        self._axis = len(shape) - 1 - self.axis if fortran else self.axis
        self._outer = math.prod(self._shape[: self._axis])
        self._inner = math.prod(self._shape[self._axis + 1 :])
        self._offset = offset
        if self._outer > 1:  # many short reads: so few times as memory allows
            row = max(1, self.dtype.itemsize * math.prod(self.shape[1:]))
            self._chunk = max(1, SLAB_BYTES // 2 // row)
        self._file = os.open(where.path, os.O_RDONLY | os.O_CLOEXEC)

    def _rows(self, start: int, stop: int) -> Array:
        array = np.empty((self._outer, stop - start, self._inner), self.dtype)
        size = self.dtype.itemsize * self._inner
        for outer, run in enumerate(array):
            self._fill(run, self._offset + (outer * self.shape[0] + start) * size)
        before, after = self._shape[: self._axis], self._shape[self._axis + 1 :]
        array = array.reshape(*before, stop - start, *after)
        return np.moveaxis(array.T if self._reversed else array, self.axis, 0)

    def _fill(self, run: Array, offset: int) -> None:
        room = memoryview(_bytes(run))
        while room:
            try:
                count = os.preadv(self._file, [room], offset)
            except OSError as error:
                raise unreadable(self.where, error) from None
            if not count:
                raise DataError(f"{self.where.path} was cut off while it was being read")
            room, offset = room[count:], offset + count

    def close(self) -> None:
        """See `ArrayFile`."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


class Member(ArrayFile):
    """A compressed member of an .npz: a stream that goes forward, kept open between pieces."""

    def __init__(self, where: Where, axis: int, member: "_Stream") -> None:
        super().__init__(where, member.dtype, member.shape, axis)
        self._member = member

    def _rows(self, start: int, stop: int) -> Array:
        try:
            if self._member.fortran or self.axis:
                return np.moveaxis(self._member.whole(), self.axis, 0)[start:stop]
            return self._member.range(start, stop)
        except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
            raise unreadable(self.where, error) from None


class _Stream:
    def __init__(self, path: str, name: str) -> None:
        self._archive = zipfile.ZipFile(path)
        self._file = self._archive.open(name)
        self.shape, self.fortran, self.dtype = _header(self._file)
        self.begin = self._file.tell()
        self._whole: Array | None = None

    def range(self, start: int, stop: int) -> Array:
        array = np.empty((stop - start, *self.shape[1:]), self.dtype)
        row = self.dtype.itemsize * math.prod(self.shape[1:])
        self._file.seek(self.begin + start * row)
        self._read(array)
        return array

    def whole(self) -> Array:
        """Of another order than the rows': it has to be in memory."""
        if self._whole is None:
            order = self.shape[::-1] if self.fortran else self.shape
            array = np.empty(order, self.dtype)
            self._file.seek(self.begin)
            self._read(array)
            self._whole = array.T if self.fortran else array
        return self._whole

    def _read(self, array: Array) -> None:
        room = memoryview(_bytes(array))
        while room:
            content = self._file.read(min(len(room), 2**20))
            if not content:
                raise EOFError("the archive is cut off")
            room[: len(content)] = content
            room = room[len(content) :]


def _bytes(array: Array) -> Any:
    return array.reshape(-1).view(np.uint8)


@lru_cache(maxsize=4)
def _stream(path: str, name: str, size: int, mtime_ns: int) -> _Stream:
    return _Stream(path, name)


def _header(file: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Shape, whether in Fortran's order, dtype.

    Raises:
        ValueError: It is not that of a .npy file.
    """
    try:
        version = np.lib.format.read_magic(file)
    except ValueError:
        raise ValueError("it does not begin as a NumPy file does") from None
    read = np.lib.format.read_array_header_1_0
    if version > (1, 0):
        read = np.lib.format.read_array_header_2_0
    shape, fortran, dtype = read(file)
    if any(size < 0 for size in shape):
        raise ValueError(f"its header says shape {shape}")
    return shape, fortran, dtype


def _npy(where: Where, file: IO[bytes], axis: int, offset: int, size: int) -> Flat:
    """The .npy file of `size` bytes at `offset`."""
    file.seek(offset)
    shape, fortran, dtype = _header(file)
    begin = file.tell()
    _check_dtype(where, dtype)
    _check_size(where, dtype.itemsize * math.prod(shape), size - (begin - offset))
    return Flat(where, dtype, shape, axis, begin, fortran)


def _check_size(where: Where, needed: int, found: int) -> None:
    if needed > found:
        raise DataError(
            f"{where} is truncated: its header says {needed:,} bytes of data, {found:,} are there"
        )
    if needed < found:
        raise DataError(
            f"{where} has {found - needed:,} bytes behind its array: save one array in a file"
        )


def npz_names(path: str) -> list[str]:
    """The keys of an .npz.

    Raises:
        DataError: It cannot be read.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        raise unreadable(Where(path), error) from None
    keys = [name.removesuffix(".npy") for name in names if name.endswith(".npy")]
    if twice := {key for key in keys if keys.count(key) > 1}:
        raise DataError(f"{path} holds {min(twice)!r} twice")
    if other := [name for name in names if not name.endswith(".npy")]:
        raise DataError(f"{path} holds {other[0]!r}, which is not an array")
    return keys


def _npz(where: Where, axis: int) -> ArrayFile:
    name = choose(where, dict.fromkeys(npz_names(where.path), "")) + ".npy"
    found = os.stat(where.path)
    with zipfile.ZipFile(where.path) as archive:
        info = archive.getinfo(name)
        if info.flag_bits & 1:
            raise DataError(f"{where} is encrypted")
        if info.compress_type == zipfile.ZIP_STORED:
            with open(where.path, "rb") as file:
                file.seek(info.header_offset + 26)  # the lengths of name and extra field
                lengths = np.frombuffer(file.read(4), "<u2")
                offset = info.header_offset + 30 + int(lengths.sum())
                return _npy(where, file, axis, offset, info.file_size)
    stream = _stream(where.path, name, found.st_size, found.st_mtime_ns)
    _check_dtype(where, stream.dtype)
    needed = stream.dtype.itemsize * math.prod(stream.shape)
    _check_size(where, needed, info.file_size - stream.begin)
    return Member(where, axis, stream)


def _raw(where: Where, axis: int) -> Flat:
    if not where.key:
        if os.path.isdir(where.path):
            raise DataError(f"{where.path} is a folder; {FORMS}")
        os.stat(where.path)
        raise ConfigError(f"{where.path}: its name does not say what it is; {FORMS}")
    match = re.fullmatch(r"([^:]+)(?::(\d+(?:x\d+)*)?)?(?::(\d+))?", where.key)
    try:
        dtype = np.dtype(match[1] if match else "")
    except TypeError:
        match = None
    if match is None:
        raise ConfigError(
            f"{where}: raw numbers are FILE:DTYPE:SHAPE of one sample, such as u.bin:float32:3x64 "
            "(then :SKIP, bytes of a header); other formats go by the file's ending"
        )
    if axis:
        raise ConfigError(f"--axis: in {where.path} samples follow each other, so it is 0")
    _check_dtype(where, dtype)
    sample = tuple(int(size) for size in match[2].split("x")) if match[2] else ()
    size, skip = os.stat(where.path).st_size, int(match[3] or 0)
    row = dtype.itemsize * math.prod(sample)
    if not row:
        raise ConfigError(f"{where}: every size of a shape is at least 1")
    if size < skip or (size - skip) % row:
        raise DataError(
            f"{where} has {size - skip:,} bytes{f' behind the first {skip:,}' * bool(skip)}, which "
            f"is no multiple of a sample's {row:,}: another shape or dtype, or it is truncated"
        )
    return Flat(where, dtype, ((size - skip) // row, *sample), 0, skip)


def named_by_files(files: Iterable[Path]) -> Iterator[tuple[str, Where]]:
    """The fields of files without `--field`: each .npy by its stem, each .npz by its keys.

    Raises:
        DataError: An .npz cannot be read.
        ConfigError: Another format, with the arrays that are in it.
    """
    for path in map(str, files):
        where = Where(path)
        if where.kind == "npy":
            yield Path(path).stem, where
        elif where.kind == "npz":
            for key in npz_names(path):
                yield key, Where(path, key)
        else:
            open_array(where).close()  # says what is in it
            raise ConfigError(f"{path}: say which field it is: --field NAME={path}")
