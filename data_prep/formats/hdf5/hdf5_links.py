"""The links of HDF5 files, which may lead to other files."""

import os
from functools import lru_cache
from typing import Any

import h5py

from data_prep.formats.arrays.array_base import Where, unreadable
from data_prep.formats.hdf5.hdf5_storage import Written
from hpctrain.errors import DataError

SHOWN = 20  # names that a message lists
_HOPS = 64  # links followed one after the other; more are taken for a circle


class Links:
    """Finds a dataset link by link, so that every link to another file is noticed, in `files`."""

    def __init__(self, where: Where, external: bool) -> None:
        self._where, self._external = where, external
        self.files: list[str] = []

    def find(self, root: Any, key: str, hops: int = 0) -> Any:
        """Return the object at a path, or None if there is none."""
        here, names = root, [name for name in key.split("/") if name not in ("", ".")]
        while names:
            name = names.pop(0).encode()
            if not isinstance(here, h5py.Group) or not here.id.links.exists(name):
                return None
            kind = here.id.links.get_info(name).type
            if kind == h5py.h5l.TYPE_SOFT:
                target = here.id.links.get_val(name).decode()
                hops += 1
                if hops > _HOPS:
                    raise DataError(f"{self._where}: its links lead in a circle")
                names = [part for part in target.split("/") if part not in ("", ".")] + names
                here = here.file if target.startswith("/") else here
                continue
            if kind == h5py.h5l.TYPE_EXTERNAL:
                file, target = (os.fsdecode(part) for part in here.id.links.get_val(name))
                self._outside(here.file.filename, file, f"an external link to {file}:{target}")
                hops += 1
                if hops > _HOPS:
                    raise DataError(f"{self._where}: its links lead in a circle")
            try:
                here = here[name]
            except (KeyError, OSError) as error:
                raise unreadable(self._where, OSError(str(error))) from None
        return here

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
            missing = target == root.filename and self.find(root, source, 1) is None
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
