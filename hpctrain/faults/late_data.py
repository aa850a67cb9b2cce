"""Say where the data is made while its first batch does not come.

Nobody knows how long that one may take, so `long_work` waits for it without an end.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TypeVar

import torch.distributed as dist

from hpctrain.faults.collectives import Record

log = logging.getLogger(__name__)
Item = TypeVar("Item")
_LATE_S = 60.0


def told_if_late(
    what: str, items: Iterable[Item], processes: Callable[[], Mapping[str, str]] = dict
) -> Iterator[Item]:
    """Yield the items; while the first one is late, the log says once where its making is.

    Args:
        what: What the first item is, for the log.
        items: They are made in this thread, the main one.
        processes: Returns the stacks of the processes that make the data (`Record`).
    """
    remaining = iter(items)
    timer = threading.Timer(_LATE_S, _tell, (what, processes))
    timer.daemon = True
    timer.start()
    try:
        first = next(remaining, None)
    finally:
        timer.cancel()
    if first is not None:
        yield first
        del first
        yield from remaining


def _tell(what: str, processes: Callable[[], Mapping[str, str]]) -> None:
    rank = dist.get_rank() if dist.is_initialized() else 0
    record = Record.of_this_process(rank, socket.gethostname(), None, None, processes)
    makers = [f"it is at {record.at}"] if record.data is None else [f"at {record.at}", *record.data]
    values = rank, record.host, what, _LATE_S, "; ".join(makers)
    log.warning("rank %d (%s) has waited for %s for %g s: %s", *values)
