"""Messages between processes: small JSON files in a folder, such as a run directory.

    class StopRequest(Message, frozen=True):
        BOX = "stop"
        by: str

    StopRequest(by="anna").put(run)    RUN/stop: all of it is there, or nothing
    StopRequest.get(run)               what was put there last; None without a message
    StopRequest.drop(run)              it is over

A kind of message has a box of its own. `*` in its name stands for one of several, such as a node.
"""

from pathlib import Path
from typing import ClassVar, Self

from hpctrain.base.errors import DamageError
from hpctrain.base.files.disk import write_atomically
from hpctrain.base.files.record import Record, read, written


class Message(Record, frozen=True):
    """A message, which another process reads; after a crash of the machine it may be lost."""

    BOX: ClassVar[str]  # its place in the folder

    @classmethod
    def path(cls, folder: Path, name: str = "") -> Path:
        """Return the file of a message."""
        return folder / cls.BOX.replace("*", name)

    def put(self, folder: Path, name: str = "") -> None:
        """Leave it in a folder, which must be there; an OSError if it cannot be written."""
        path = self.path(folder, name)
        if path.parent != folder:
            path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, written(self), sync=False)

    @classmethod
    def get(cls, folder: Path, name: str = "") -> Self | None:
        """Return the message in a folder; None if there is none, or it cannot be read."""
        try:
            return read(cls, cls.path(folder, name), 1 + cls.BOX.count("/"))
        except (OSError, DamageError):
            return None

    @classmethod
    def drop(cls, folder: Path) -> None:
        """Remove the message, if there is one."""
        cls.path(folder).unlink(missing_ok=True)
