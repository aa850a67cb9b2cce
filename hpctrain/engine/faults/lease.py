"""A rank's lease: it ends itself when rank 0 has gone, or cannot be reached any more.

On a node that Slurm has lost, a rank would wait for the others until `parallel.timeout_s`, while
another step of the job trains the run. A thread waits for a key of the store, in C++ without
Python's lock, so nothing is done during a step.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch.distributed as dist

from hpctrain.cluster.ranks.leaving import end_at_once
from hpctrain.cluster.ranks.port import keep_alive

_LEASE_S = 60.0  # after rank 0 has gone; if only its host has, Linux asks for a minute before
_END_S = 5.0
_FOR_EVER = timedelta(days=365)


@contextmanager
def lease(store: dist.Store | None, rank: int, port: int) -> Iterator[None]:
    """Let this rank end itself in the context, a minute after rank 0 has gone.

    `store` is that of the process group, on this port of rank 0; without one nothing is done.
    """
    if store is None:
        yield
        return
    key, over = f"lease/{rank}", threading.Event()
    own = store.clone()  # type: ignore[attr-defined]  # torch's stub lacks it

    def listen() -> None:
        try:
            own.wait([key], _FOR_EVER)
        except RuntimeError:  # the store has ended with rank 0, or the network is gone
            if not over.wait(_LEASE_S):
                end_at_once("rank 0 has ended or cannot be reached, so this rank ends, too")

    keep_alive(port)
    thread = threading.Thread(target=listen, name="hpctrain-lease", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        with suppress(RuntimeError):
            store.set(key, "end")
        # A thread that comes back while the interpreter ends would abort it.
        thread.join(_END_S)
