"""Check that the values that HDF5 returns were written, and into the file that the user named.

Links, virtual datasets and external storage lead to other files. `Links` notices each of them.

HDF5 returns other values without any error in two cases. Values that were never written, and parts
of a virtual dataset without a source, are read as the fill value, or as whatever is in memory if
the writer has switched fill values off. And the list of chunks may be damaged, because its B-tree
has no checksum: HDF5 then does not find some chunks, and takes them for never written.
"""

import itertools
import math
import os
from contextlib import suppress
from functools import cached_property, lru_cache
from typing import Any

import h5py
import numpy as np

from data_prep.formats.arrays.array_base import Where, never_written
from data_prep.formats.opening import way
from hpctrain.errors import DataError
from hpctrain.shards.storage.chunk_table import chunk_grid, listed_chunks
from hpctrain.shards.storage.inside import Circle, Elsewhere, walk
from hpctrain.shards.storage.scratch import Damaged
from hpctrain.shards.types import Int64s

SHOWN = 20  # names that a message lists
_SPARSE = ("data", "indices", "indptr")


def of_another_program(found: Any) -> str:
    """Return why an object of MATLAB, or of a sparse matrix, is not read as it lies; or ""."""
    for place in (found, found.parent):
        if "MATLAB_class" in place.attrs:
            return f"is of MATLAB, whose axes are reversed in HDF5: {way('x.mat')}"
        inside = place is found or found.name.rpartition("/")[2] in _SPARSE
        parts = isinstance(place, h5py.Group) and all(name in place for name in _SPARSE)
        if parts and inside:
            return f"is a sparse matrix, or a part of one: {way('x.h5ad')}"
    return ""


class Written:
    """The part of a dataset that was written into the file."""

    def __init__(self, dataset: h5py.Dataset) -> None:
        self._dataset, self._shape, self._chunks = dataset, dataset.shape, dataset.chunks
        properties = dataset.id.get_create_plist()
        # Whether a fill value stands for what was never written.
        self.filled = properties.fill_value_defined() != h5py.h5d.FILL_VALUE_UNDEFINED and (
            properties.get_fill_time() != h5py.h5d.FILL_TIME_NEVER
        )
        self._sparse = False  # some chunk was not found

    def unwritten(self, axis: int = 0) -> int:
        """Return how many rows along an axis have values that were never written."""
        dataset, size = self._dataset, (self._shape or (1,))[axis]
        if not dataset.size or dataset.external:
            return 0
        if dataset.is_virtual:
            return _without_source(dataset, axis)
        if self._chunks is None:
            return 0 if dataset.id.get_storage_size() else size
        if dataset.id.get_num_chunks() == math.prod(self._grid):
            return 0
        try:
            places = np.unravel_index(self._listed, self._grid)[axis]
        except Damaged:  # `problem` says how
            return 0
        found, counts = np.unique(places, return_counts=True)
        whole = found[counts == math.prod(self._grid) // self._grid[axis]]
        step = self._chunks[axis]
        return size - int((np.minimum((whole + 1) * step, size) - whole * step).sum())

    def problem(self, start: int = 0, stop: int | None = None, axis: int = 0) -> str:
        """Return why the rows `start` to `stop` along `axis` are damaged, or ""."""
        shape, chunks = self._shape, self._chunks
        if chunks is None:
            return ""
        grid = [range(0, size, step) for size, step in zip(shape, chunks, strict=True)]
        step, stop = chunks[axis], shape[axis] if stop is None else stop
        grid[axis] = range(start // step * step, stop, step)
        for place in itertools.product(*grid):
            # A failing search is slow. After the first one, only listed chunks are searched.
            if (not self._sparse or self._is_listed(place)) and self._is_found(place):
                continue
            self._sparse = True
            try:
                is_listed = self._is_listed(place)
            except Damaged as error:
                return f"is damaged: {error}"
            if is_listed:
                return f"is damaged: HDF5 does not find the chunk at {list(place)} that it lists"
        return ""

    def _is_found(self, place: tuple[int, ...]) -> bool:
        """Return whether HDF5 finds a chunk. Its bytes are not read: there is no room for them."""
        with suppress(OSError, RuntimeError):
            try:
                self._dataset.id.read_direct_chunk(place, out=bytearray())
            except ValueError:
                return True
        return False

    def _is_listed(self, place: tuple[int, ...]) -> bool:
        number = 0
        for at, step, count in zip(place, self._chunks, self._grid, strict=True):
            number = number * count + at // step
        at = int(np.searchsorted(self._listed, number))
        return at < len(self._listed) and bool(self._listed[at] == number)

    @cached_property
    def _grid(self) -> list[int]:
        return chunk_grid(self._dataset)

    @cached_property
    def _listed(self) -> Int64s:
        numbers, _ = listed_chunks(self._dataset)
        return np.sort(numbers)


class Links:
    """Finds a dataset link by link, so that every link to another file is noticed, in `files`."""

    def __init__(self, where: Where, external: bool) -> None:
        self._where, self._external = where, external
        self.files: list[str] = []
        # What a source of a virtual dataset lacks, and whether a fill value stands for it.
        self.unwritten, self.filled = "", True

    def find(self, root: h5py.Group, key: str) -> Any:
        """Return the object at a path, or None if there is none."""
        try:
            return walk(root, key, self._leave)
        except Elsewhere as error:
            raise DataError(f"{self._where} {error}") from None
        except Circle:
            raise DataError(f"{self._where}: its links lead in a circle") from None

    def _leave(self, group: h5py.Group, file: str, target: str) -> None:
        self._outside(group.file.filename, file, f"an external link to {file}:{target}")

    def dataset(self, found: Any) -> Any:
        """Check that an object is a dataset whose values are in files that may be read."""
        if not isinstance(found, h5py.Dataset):
            inside = ", ".join([*found][:SHOWN]) or "there are none"
            raise DataError(f"{self._where} is a group; name one of the arrays in it: {inside}")
        if found.external:
            raise DataError(
                f"{self._where} keeps its values in another file, {found.external[0][0]!r}; "
                "--field NAME=FILE:DTYPE:SHAPE reads raw files"
            )
        if found.is_virtual:
            self._check_sources(found.file, found.file.filename, found.name, ())
        return found

    def _check_sources(
        self, root: h5py.File, path: str, name: str, above: tuple[tuple[str, str], ...]
    ) -> None:
        """Check that the datasets of a virtual dataset exist, and none of them is it."""
        here = os.path.realpath(path), name.strip("/")
        if here in above:  # HDF5 would follow the circle until the process crashes
            raise DataError(f"{self._where}: its virtual datasets lead in a circle")
        sources, *_ = _sources(path, name, os.stat(path).st_mtime_ns) or ((),)
        for file, source in sources:
            of, target = ("it", path) if file == "." else (file, "")
            what = f"virtual, of values in {file}:{source}"
            target = target or self._outside(path, file, what)
            # In this file, a link could lead to another one.
            missing = target == root.filename and self.find(root, source) is None
            below = _sources(target, source, os.stat(target).st_mtime_ns)
            what = f"is virtual, and {source} of {of}"
            if missing or below is None or below[1]:
                problem = "is missing" if missing or below is None else below[1]
                raise DataError(f"{self._where} {what} {problem}")
            if below[2]:
                self.unwritten = self.unwritten or f"{what} {below[2]}"
                self.filled = self.filled and below[3]
            self._check_sources(root, target, source, (*above, here))

    def _outside(self, base: str, file: str, what: str) -> str:
        """Return the path of another file that is read, if that is allowed."""
        if not self._external:
            raise DataError(f"{self._where} is {what}; --external allows other files")
        path = os.path.join(os.path.dirname(base), file)
        if not os.path.isfile(path):  # HDF5 would return fill values
            raise DataError(f"{self._where} is {what}, and {path} is not there")
        self.files.append(path)
        return path


def _without_source(dataset: h5py.Dataset, axis: int) -> int:
    """Return how many rows along an axis of a virtual dataset are not all in some source."""
    left, shape = h5py.h5s.create_simple(dataset.shape), dataset.shape
    left.select_all()
    for source in dataset.virtual_sources():
        space = source.vspace
        if space.get_select_type() == h5py.h5s.SEL_ALL:
            return 0
        if space.is_regular_hyperslab():
            slabs = [space.get_regular_hyperslab()]
        else:
            blocks = space.get_select_hyper_blocklist()
            slabs = [(low, None, (1,) * len(shape), high - low + 1) for low, high in blocks]
        for start, stride, count, block in slabs:
            # A selection without an end goes on to the end of the dataset.
            most = [-(-(n - a) // b) for n, a, b in zip(shape, start, stride or block, strict=True)]
            count = tuple(map(min, count, most))
            left.select_hyperslab(tuple(start), count, stride, tuple(block), h5py.h5s.SELECT_NOTB)
    if not left.get_select_npoints():
        return 0
    count = end = 0
    spans: list[list[int]] = left.get_select_hyper_blocklist()[:, :, axis].tolist()
    for low, high in sorted(spans):
        count, end = count + max(0, high + 1 - max(low, end)), max(end, high + 1)
    return count


@lru_cache(maxsize=4096)
def _sources(
    path: str, name: str, _: int
) -> tuple[tuple[tuple[str, str], ...], str, str, bool] | None:
    """Return the files and datasets that a virtual dataset is made of, and what `Written` says.

    Returns None without a dataset. The third argument is the file's time, for the cache.
    """
    with h5py.File(path, "r", locking=False) as file:
        found = file.get(name)
        if not isinstance(found, h5py.Dataset):
            return None
        sources = found.virtual_sources() if found.is_virtual else ()
        names = tuple((source.file_name, source.dset_name) for source in sources)
        written = Written(found)
        lacks = never_written(written.unwritten(), (*found.shape, 1)[0])
        return names, written.problem(), lacks, written.filled
