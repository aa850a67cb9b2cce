"""Work of unknown length on some ranks while the other ranks wait for them.

A collective fails after `parallel.timeout_s`, but sending the shards to all nodes, verifying them
or making the first copies may take hours. Here a rank waits for as long as the others are alive:

    with long_work("data.stage=sbcast"):    # all ranks enter
        if ranks.is_main:
            broadcast(...)
                                            # all ranks leave, when the last one has finished

The ranks count in the store of the process group who has arrived. A rank that dies is the matter of
its launcher and of the observers (`hpctrain.faults.observer`), as at any other time.
"""

import itertools
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from hpctrain import marks
from hpctrain.errors import DistributedError

if TYPE_CHECKING:
    from torch.distributed import Store

Item = TypeVar("Item")

_LONGEST_NAP_S = 0.5


@dataclass
class Group:
    """The facts about the process group that `long_work` needs."""

    store: "Store"
    rank: int
    world_size: int
    numbers: Iterator[int] = field(default_factory=itertools.count)


_groups: list[Group] = []
waits_for = ""
"""The work of other ranks for which this rank waits; "" for none."""


@contextmanager
def use(group: Group) -> Iterator[None]:
    """Let `long_work` use this group, until the context ends."""
    _groups.append(group)
    try:
        yield
    finally:
        _groups.remove(group)


def store() -> "Store | None":
    """Return the store of the process group; None without one."""
    return _groups[-1].store if _groups else None


@contextmanager
def long_work(what: str, *, known: bool = False) -> Iterator[None]:
    """Wait at the end of the context until every rank has reached it, however long that takes.

    Every rank enters the context, in the same order as any other collective operation. Without
    other ranks nothing is waited for. `what` names the work in errors: a DistributedError says that
    another rank failed inside the context. If it is `known` how long the
    phase takes, the limit of the phase holds.
    """
    with nullcontext() if known else marks.in_long_work():
        yield from _together(what)


def _together(what: str) -> Iterator[None]:
    if not _groups or _groups[-1].world_size == 1:
        yield
        return
    group = _groups[-1]
    meeting = f"long_work/{next(group.numbers)}"
    try:
        yield
    except BaseException as error:
        with suppress(RuntimeError):  # the store may be gone with rank 0
            why = f"rank {group.rank} failed: {type(error).__name__}: {error}"
            group.store.set(f"{meeting}/failed", why)
        raise
    global waits_for
    waits_for = what
    try:
        _wait(group, meeting, what)
    except RuntimeError as error:  # of the store, which rank 0 (or the launcher) serves
        raise DistributedError(f"{what}: rank 0 is gone ({error})") from error
    finally:
        waits_for = ""


def _wait(group: Group, meeting: str, what: str) -> None:
    """Return when all ranks have called this. All store operations here return at once."""
    store, arrived, nap = group.store, f"{meeting}/arrived", 0.002
    store.add(arrived, 1)
    while store.add(arrived, 0) < group.world_size:
        if store.check([f"{meeting}/failed"]):
            raise DistributedError(f"{what}: {store.get(f'{meeting}/failed').decode()}")
        time.sleep(nap)
        nap = min(2 * nap, _LONGEST_NAP_S)


def first_in_long_work(what: str, items: Iterable[Item]) -> Iterator[Item]:
    """Yield the items; the ranks wait for each other's first one as `long_work` does."""
    remaining = iter(items)
    with long_work(what, known=marks.was_left()):
        first = list(itertools.islice(remaining, 1))
    yield from first
    del first
    for item in remaining:
        marks.go_on()
        yield item
        del item
