"""A rank that cannot reach rank 0 any more ends itself."""

import os
import socket
import threading
from contextlib import suppress

import pytest
import torch.distributed as dist

from hpctrain.engine.distributed import group


def test_a_rank_whose_rank_0_has_gone_ends_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would wait for the others until `parallel.timeout_s`. Its end is only noted here."""
    ended = threading.Event()
    monkeypatch.setattr(group, "end_at_once", lambda why: ended.set())
    monkeypatch.setattr(group, "_LEASE_S", 0.0)
    server = dist.TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False)
    store = dist.TCPStore("127.0.0.1", server.port, 2, wait_for_workers=False)
    before = len(os.listdir("/proc/self/fd"))
    with group.lease(store, 1, server.port):
        assert len(os.listdir("/proc/self/fd")) <= before + 2  # of the lease's own store
        asks = []
        for name in os.listdir("/proc/self/fd"):
            with suppress(OSError), socket.socket(fileno=os.dup(int(name))) as one:
                if one.family != socket.AF_UNIX and one.getpeername()[1] == server.port:
                    asks.append(one.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE))
        assert asks  # Linux asks whether rank 0 is there, on every connection to it
        assert all(asks)
        assert not ended.is_set()
        del server
        assert ended.wait(60)
