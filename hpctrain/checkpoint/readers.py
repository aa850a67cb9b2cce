"""Who else reads the checkpoints of a run, and needs them for longer than the run itself."""

from collections.abc import Collection


class Readers:
    """Nobody else: the null form."""

    def saved(self) -> None:
        """Learn that a checkpoint is committed; this must not wait for anything."""

    def needed(self) -> Collection[int]:
        """Return the steps of the checkpoints that must not be removed yet."""
        return ()

    def finish(self) -> None:
        """Finish what the last save has begun; the run is over."""
