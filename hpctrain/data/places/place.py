"""The places from which the files of shards are opened."""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from hpctrain.shards.index import Shard


class Place(Protocol):
    """Gives the file of a shard. Threads may share it. A forked child gets its own state."""

    def path(self, shard: Shard) -> Path:
        """Return the file to open. May wait until it exists. The file stays until `release`."""

    def plan(self, shards: Sequence[Shard]) -> None:
        """Announce the shards that are needed next, in this order, so that copying may start."""

    def release(self, shard: Shard) -> None:
        """Say that a shard is not needed for now. A file that is mapped stays readable."""

    def close(self) -> None:
        """Say that no shard is needed any more."""


class Folder:
    """The folder of the data set itself: nothing is copied."""

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
