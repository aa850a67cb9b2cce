"""Say where the data is made while its first batch, or sample, does not come.

Nobody knows how long that one may take, so `long_work` waits for it without an end.
"""

import logging
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TypeVar

import torch.distributed as dist

from hpctrain.faults.collectives import Record

log = logging.getLogger(__name__)
Item = TypeVar("Item")
_LATE_S = 60.0


@contextmanager
def late_told(what: str, processes: Callable[[], Mapping[str, str]] = dict) -> Iterator[None]:
    """Say once in the log where the main thread, and the data, are if the context lasts long.

    `what` is made in it, and `processes` returns the stacks of those that make the data.
    """
    timer = threading.Timer(_LATE_S, _tell, (what, processes))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def told_if_late(
    what: str, items: Iterable[Item], processes: Callable[[], Mapping[str, str]] = dict
) -> Iterator[Item]:
    """Yield the items; the first one is made in `late_told`."""
    remaining = iter(items)
    with late_told(what, processes):
        first = next(remaining, None)
    if first is not None:
        yield first
        del first
        yield from remaining


def _tell(what: str, processes: Callable[[], Mapping[str, str]]) -> None:
    rank = dist.get_rank() if dist.is_initialized() else 0
    record = Record.of_this_process(rank, socket.gethostname(), None, None, processes)
    makers = [f"it is at {record.at}"] if record.data is None else [f"at {record.at}", *record.data]
    values = rank, record.host, what, _LATE_S, "; ".join(makers)
    log.warning("rank %d (%s): %s takes more than %g s; %s", *values)
