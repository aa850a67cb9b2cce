"""Work of unknown length on some ranks while the other ranks wait for them.

A collective fails after `parallel.timeout_s`, but making the first copies of the shards may take
hours. Here a rank waits for as long as the others are alive:

    with long_work("preparing the data"):   # all ranks enter
        prepare(my_part)
                                            # all ranks leave, when the last one has finished

    every rank    sets its heartbeat in the store of the process group, in a thread
    rank 0        watches the heartbeats of all other ranks once it has finished its own work
    other ranks   watch the heartbeat of rank 0
"""

import itertools
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from hpctrain.base.errors import DistributedError
from hpctrain.base.processes import marks

if TYPE_CHECKING:
    from torch.distributed import Store

Item = TypeVar("Item")

_LONGEST_NAP_S = 0.5
_LONGEST_PERIOD_S = 10.0


@dataclass
class Group:
    """The facts about the process group that `long_work` needs.

    A rank counts as dead after `timeout_s` seconds without a heartbeat in the `store` of all ranks.
    """

    store: "Store"
    rank: int
    world_size: int
    timeout_s: float
    _numbers: Iterator[int] = field(default_factory=itertools.count)


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
    another rank failed inside the context, or gives no sign of life. If it is `known` how long the
    phase takes, the limit of the phase holds.
    """
    with nullcontext() if known else marks.in_long_work():
        if _groups and _groups[-1].world_size > 1:
            yield from _together(what)
        else:
            yield


def _together(what: str) -> Iterator[None]:
    meeting = _Meeting(_groups[-1], what)
    with meeting.heartbeat():
        try:
            yield
        except BaseException as error:
            with suppress(RuntimeError):  # the store may be gone with rank 0
                meeting.fail(error)
            raise
        global waits_for
        waits_for = what
        try:
            meeting.wait()
        except RuntimeError as error:  # of the store, which rank 0 (or the launcher) serves
            raise DistributedError(f"{what}: rank 0 is gone ({error})") from error
        finally:
            waits_for = ""


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


class _Meeting:
    """One use of `long_work`. All store operations here return at once."""

    def __init__(self, group: Group, what: str) -> None:
        self._group, self._what = group, what
        self._prefix = f"long_work/{next(group._numbers)}"
        others = range(1, group.world_size)
        self._watched = others if group.rank == 0 else range(1)
        # For each watched rank, its number of heartbeats and the time when it was first seen.
        self._seen: dict[int, tuple[int, float]] = {}

    @contextmanager
    def heartbeat(self) -> Iterator[None]:
        """Count this rank's heartbeats in the store, in a thread, until the context ends."""
        ended = threading.Event()
        name = "hpctrain-long-work"
        thread = threading.Thread(target=self._beat, args=(ended,), name=name, daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def fail(self, error: BaseException) -> None:
        """Tell the other ranks that this one has failed."""
        reason = f"rank {self._group.rank} failed: {type(error).__name__}: {error}"
        self._group.store.set(f"{self._prefix}/failed", reason)

    def wait(self) -> None:
        """Return when all ranks have called this."""
        store, arrived = self._group.store, f"{self._prefix}/arrived"
        store.add(arrived, 1)
        nap, next_check = 0.002, 0.0
        while store.add(arrived, 0) < self._group.world_size:
            if store.check([f"{self._prefix}/failed"]):
                reason = store.get(f"{self._prefix}/failed").decode()
                raise DistributedError(f"{self._what}: {reason}")
            if time.monotonic() >= next_check:
                self._check_heartbeats()
                next_check = time.monotonic() + self._period_s
            time.sleep(nap)
            nap = min(2 * nap, _LONGEST_NAP_S)

    @property
    def _period_s(self) -> float:
        return min(self._group.timeout_s / 4, _LONGEST_PERIOD_S)

    def _beat(self, ended: threading.Event) -> None:
        with suppress(RuntimeError):  # the store is gone: `wait` reports it
            self._group.store.add(self._heartbeats(self._group.rank), 1)
            while not ended.wait(self._period_s):
                self._group.store.add(self._heartbeats(self._group.rank), 1)

    def _check_heartbeats(self) -> None:
        for rank in self._watched:
            count = self._group.store.add(self._heartbeats(rank), 0)
            now = time.monotonic()
            if rank not in self._seen or self._seen[rank][0] != count:
                self._seen[rank] = count, now
            elif now - self._seen[rank][1] > self._group.timeout_s:
                raise DistributedError(
                    f"{self._what}: rank {rank} has given no sign of life for "
                    f"{self._group.timeout_s:g} s"
                )

    def _heartbeats(self, rank: int) -> str:
        return f"long_work/heartbeats/{rank}"  # the same for every use, so that keys stay few
