"""Find an object in an HDF5 file link by link, so that no link leads unnoticed to another file.

HDF5 follows external links, virtual datasets and external storage to any file that the user may
read: `/etc/passwd` as external storage gives samples of bytes. The digest of a shard covers none of
that, so a shard from somebody else could be used to read the files of the person who trains on it.
"""

import os
from collections.abc import Callable

import h5py

_MOST_LINKS = 64  # followed one after the other; more are taken for a circle


class Elsewhere(Exception):
    """A link or the values of a dataset are in another file; the message says how, after a name."""


class Circle(Exception):
    """Links lead to each other without end."""


def refuse(path: str, file: str, target: str) -> None:
    """Refuse an external link; see `walk`."""
    raise Elsewhere(f"is a link into {file}")


def walk(
    root: h5py.Group, place: str, outside: Callable[[str, str, str], object] = refuse
) -> h5py.Group | h5py.Dataset | None:
    """Return the object at a path below `root`, or None if there is none.

    `outside(path, file, target)` is asked before an external link is followed, from the file `path`
    to `target` in another file; it raises an exception if that is not allowed. A link of a type
    that a plug-in of HDF5 would follow is Elsewhere.
    """
    here: h5py.Group | h5py.Dataset = root
    names, followed = _names(place), 0
    while names:
        name = names.pop(0).encode()
        if not isinstance(here, h5py.Group) or not here.id.links.exists(name):
            return None
        kind = here.id.links.get_info(name).type
        if kind != h5py.h5l.TYPE_HARD:
            followed += 1
            if followed > _MOST_LINKS:
                raise Circle
        if kind == h5py.h5l.TYPE_SOFT:
            target = here.id.links.get_val(name).decode()
            names = _names(target) + names
            here = here.file["/"] if target.startswith("/") else here
            continue
        if kind == h5py.h5l.TYPE_EXTERNAL:
            file, target = map(os.fsdecode, here.id.links.get_val(name))
            outside(here.file.filename, file, target)
        elif kind != h5py.h5l.TYPE_HARD:
            raise Elsewhere(f"is a link of the type {kind}, which may lead to another file")
        here = here[name]
    return here


def find(file: h5py.File, place: str) -> h5py.Dataset | None:
    """Return the dataset at a path, if there is one; values in another file are Elsewhere."""
    try:
        found = walk(file["/"], place)
    except Circle:
        return None
    if not isinstance(found, h5py.Dataset):
        return None
    if found.is_virtual:
        others = sorted({source.file_name for source in found.virtual_sources()})
        raise Elsewhere(f"is a virtual dataset, of {', '.join(others[:3])}")
    if found.external:
        raise Elsewhere(f"is stored in the file {found.external[0][0]}")
    return found


def _names(place: str) -> list[str]:
    return [name for name in place.split("/") if name not in ("", ".")]
