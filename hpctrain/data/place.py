"""Where the files of a data set's shards are read from."""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from hpctrain.data.index import Shard


class Place(Protocol):
    """Gives a shard's file. Threads may share it; a fork gets its own state."""

    def path(self, shard: Shard) -> Path:
        """Where to open it now; may wait until it is there. It stays until `release`."""

    def plan(self, shards: Sequence[Shard]) -> None:
        """These are needed next, in this order: what takes time may begin."""

    def release(self, shard: Shard) -> None:
        """This one is not needed for now; a file that is mapped stays readable."""

    def close(self) -> None:
        """Nothing more is needed."""


class Folder:
    """The data set's own folder: nothing is moved."""

    def __init__(self, folder: Path) -> None:
        self.folder = Path(folder)

    def path(self, shard: Shard) -> Path:
        """See `Place`."""
        return self.folder / shard.path

    def plan(self, shards: Sequence[Shard]) -> None:
        """See `Place`."""

    def release(self, shard: Shard) -> None:
        """See `Place`."""

    def close(self) -> None:
        """See `Place`."""
