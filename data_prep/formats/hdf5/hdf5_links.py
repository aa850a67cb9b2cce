"""The other files that an array of an HDF5 file needs, and whether they may be read."""

import os
from functools import lru_cache
from typing import Any

import h5py

from data_prep.formats.arrays.array_base import Where, unreadable
from data_prep.formats.hdf5.hdf5_storage import Written
from hpctrain.errors import DataError
from hpctrain.shards.storage.inside import Circle, Elsewhere, walk

SHOWN = 20  # names that a message lists


class Links:
    """Finds a dataset link by link, so that every link to another file is noticed, in `files`."""

    def __init__(self, where: Where, external: bool) -> None:
        self._where, self._external = where, external
        self.files: list[str] = []

    def find(self, root: Any, key: str) -> Any:
        """Return the object at a path, or None if there is none."""
        try:
            return walk(root, key, self._link)
        except Circle:
            raise DataError(f"{self._where}: its links lead in a circle") from None
        except Elsewhere as error:
            raise DataError(f"{self._where} {error}") from None
        except (KeyError, OSError) as error:
            raise unreadable(self._where, OSError(str(error))) from None

    def _link(self, path: str, file: str, target: str) -> None:
        self._outside(path, file, f"an external link to {file}:{target}")

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
        """Check that the datasets of a virtual dataset were written, and none of them is it."""
        here = os.path.realpath(path), name.strip("/")
        if here in above:  # HDF5 would follow the circle until the process crashes
            raise DataError(f"{self._where}: its virtual datasets lead in a circle")
        sources, _ = _sources(path, name, os.stat(path).st_mtime_ns) or ((), "")
        for file, source in sources:
            of, target = ("it", path) if file == "." else (file, "")
            what = f"virtual, of values in {file}:{source}"
            target = target or self._outside(path, file, what)
            # In this file, a link could lead to another one.
            missing = target == root.filename and self.find(root, source) is None
            below = _sources(target, source, os.stat(target).st_mtime_ns)
            if missing or below is None or below[1]:
                problem = "is missing" if missing or below is None else below[1]
                raise DataError(f"{self._where} is virtual, and {source} of {of} {problem}")
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


@lru_cache(maxsize=4096)
def _sources(path: str, name: str, _: int) -> tuple[tuple[tuple[str, str], ...], str] | None:
    """Return the files and datasets that a virtual dataset is made of, and `Written.problem`.

    Returns None without a dataset. The third argument is the file's time, for the cache.
    """
    with h5py.File(path, "r", locking=False) as file:
        found = file.get(name)
        if not isinstance(found, h5py.Dataset):
            return None
        sources = found.virtual_sources() if found.is_virtual else ()
        names = tuple((source.file_name, source.dset_name) for source in sources)
        return names, Written(found).problem()
