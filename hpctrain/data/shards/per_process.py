"""State that belongs to one process, such as locks, threads and open files.

A forked child must not use its parent's: a thread that the child does not have may hold a lock. A
pickled copy cannot take them along. Both begin with new state.
"""

import os
import weakref
from typing import Any, ClassVar


class PerProcess:
    """An object whose attributes OWN `_begin` sets, anew in a fork and in a pickled copy."""

    OWN: ClassVar[tuple[str, ...]] = ()

    def __init__(self) -> None:
        _OBJECTS.add(self)
        self._begin()

    def _begin(self) -> None:
        raise NotImplementedError

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in vars(self).items() if key not in self.OWN}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        PerProcess.__init__(self)


_OBJECTS: weakref.WeakSet[PerProcess] = weakref.WeakSet()


def _after_fork() -> None:
    for each in [*_OBJECTS]:
        each._begin()


os.register_at_fork(after_in_child=_after_fork)
