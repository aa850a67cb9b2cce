"""Write a data set that a stranger could give away: its samples are the bytes of another file."""

import h5py
import numpy as np

from hpctrain.data.shards.field import Field
from hpctrain.data.shards.index import Index, Shard
from hpctrain.data.shards.shard import digest_file

KINDS = ("external storage", "virtual dataset", "external link", "link behind links")


def planted(folder, secret, kind):
    """Write a shard whose field `x` has the bytes of the file `secret` as samples.

    The digests are right, and so HDF5 alone finds nothing wrong.
    """
    folder.mkdir()
    size = secret.stat().st_size
    other = folder.parent / "other.h5"  # only a link to HDF5 can be followed
    with h5py.File(other, "w") as file:
        file["x"] = np.frombuffer(secret.read_bytes(), np.uint8)
    path = folder / "train-00000.h5"
    with h5py.File(path, "w") as file:
        if kind == "external storage":
            file.create_dataset("x", (size,), "u1", external=[(str(secret), 0, size)])
        elif kind == "virtual dataset":
            layout = h5py.VirtualLayout((size,), "u1")
            layout[:] = h5py.VirtualSource(str(other), "x", (size,))
            file.create_virtual_dataset("x", layout)
        elif kind == "external link":
            file["x"] = h5py.ExternalLink(str(other), "/x")
        else:
            file["inner/group"] = h5py.ExternalLink(str(other), "/")
            file["x"] = h5py.SoftLink("/inner/group/x")
    with h5py.File(path) as file:
        assert file["x"][:].tobytes() == secret.read_bytes(), "the attack works with HDF5"
    shard = Shard(path.name, "train", size, path.stat().st_size, digest_file(path))
    Index({"x": Field("uint8")}, (shard,)).save(folder)
    return folder
