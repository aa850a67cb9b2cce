"""Find a dataset in a file, and refuse one whose values lie in another file.

HDF5 follows external links, virtual datasets and external storage to any file that the user may
read: `/etc/passwd` as external storage gives samples of bytes. The digest of a shard covers none of
that, so a shard from somebody else could be used to read the files of the person who trains on it.
"""

import os

import h5py

_MOST_LINKS = 64  # followed one after the other; more are taken for a circle


class Elsewhere(Exception):
    """The values of a dataset lie in another file; the message says how, after the name."""


def find(file: h5py.File, place: str) -> h5py.Dataset | None:
    """Return the dataset at a path in an open file, or None if no dataset is there.

    Soft links are followed inside the file. No other file is opened. A link that leads to another
    file, and values that lie in another file, raise Elsewhere.
    """
    here: h5py.Group | h5py.Dataset = file["/"]
    names, followed = _names(place), 0
    while names:
        name = names.pop(0).encode()
        if not isinstance(here, h5py.Group) or not here.id.links.exists(name):
            return None
        kind = here.id.links.get_info(name).type
        if kind == h5py.h5l.TYPE_SOFT:
            target = here.id.links.get_val(name).decode()
            followed += 1
            if followed > _MOST_LINKS:
                return None
            names = _names(target) + names
            here = here.file["/"] if target.startswith("/") else here
            continue
        if kind == h5py.h5l.TYPE_EXTERNAL:
            raise Elsewhere(f"is a link into {os.fsdecode(here.id.links.get_val(name)[0])}")
        if kind != h5py.h5l.TYPE_HARD:  # a link of a type that a plug-in of HDF5 would follow
            raise Elsewhere(f"is a link of the type {kind}, which may lead to another file")
        here = here[name]
    if not isinstance(here, h5py.Dataset):
        return None
    if here.is_virtual:
        others = sorted({source.file_name for source in here.virtual_sources()})
        raise Elsewhere(f"is a virtual dataset, of {', '.join(others[:3])}")
    if here.external:
        raise Elsewhere(f"is stored in the file {here.external[0][0]}")
    return here


def _names(place: str) -> list[str]:
    return [name for name in place.split("/") if name not in ("", ".")]
