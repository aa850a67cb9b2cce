"""Find a dataset in a file, and refuse one whose values lie in another file.

HDF5 follows external links, virtual datasets and external storage to any file that the user may
read: `/etc/passwd` as external storage gives samples of bytes. The digest of a shard covers none of
that, so a shard from somebody else could be used to read the files of the person who trains on it.
"""

import os
from typing import Any

import h5py

_MOST_LINKS = 64  # followed one after the other; more are taken for a circle


class Elsewhere(Exception):
    """The values of a dataset lie in another file; the message says how, after the name."""


class Circle(Exception):
    """Too many links follow each other."""


def find(file: h5py.File, place: str) -> h5py.Dataset | None:
    """Return the dataset at a path in an open file, or None if no dataset is there.

    Soft links are followed inside the file. No other file is opened. A link that leads to another
    file, and values that lie in another file, raise Elsewhere.
    """
    try:
        here = walk(file["/"], place)
    except Circle:
        return None
    if not isinstance(here, h5py.Dataset):
        return None
    if here.is_virtual:
        others = sorted({source.file_name for source in here.virtual_sources()})
        raise Elsewhere(f"is a virtual dataset, of {', '.join(others[:3])}")
    if here.external:
        raise Elsewhere(f"is stored in the file {here.external[0][0]}")
    return here


def walk(root: h5py.Group, place: str) -> Any:
    """Return the object at a path below a group, or None if there is none; see `find`.

    Links are followed one by one: too many are a Circle.
    """
    here: Any = root
    names, followed = _names(place), 0
    while names:
        name = names.pop(0).encode()
        if not isinstance(here, h5py.Group) or not here.id.links.exists(name):
            return None
        if here.id.links.get_info(name).type == h5py.h5l.TYPE_HARD:
            here = here[name]
            continue
        followed += 1
        target = _target(here, name, followed)
        names = _names(target) + names
        here = here.file["/"] if target.startswith("/") else here
    return here


def _target(group: h5py.Group, name: bytes, followed: int) -> str:
    """Return the path that a soft link has; it is the link number `followed`."""
    kind = group.id.links.get_info(name).type
    if kind not in (h5py.h5l.TYPE_SOFT, h5py.h5l.TYPE_EXTERNAL):
        raise Elsewhere(f"is a link of the type {kind}, which may lead to another file")
    if followed > _MOST_LINKS:
        raise Circle
    if kind == h5py.h5l.TYPE_EXTERNAL:
        raise Elsewhere(f"is a link into {os.fsdecode(group.id.links.get_val(name)[0])}")
    target: str = group.id.links.get_val(name).decode()
    return target


def _names(place: str) -> list[str]:
    return [name for name in place.split("/") if name not in ("", ".")]
