"""The port where rank 0 listens."""

from __future__ import annotations

import socket

from hpctrain.errors import DistributedError

# Below every usual ephemeral range (Linux: 32768-60999) and above the well-known services.
_LOW = 12_000
_SLOTS = 5_000
_PORTS_PER_SLOT = 4


def master_port(job: int, generation: int = 0) -> int:
    """The port of rank 0, which every rank computes alike without a word between them.

    Jobs own slots of four ports by their number, so two jobs on one node collide only when their
    numbers differ by a multiple of 5,000; inside the slot, successive restarts and parallel steps
    (`generation`) differ, since the port of the last incarnation may still be in TIME_WAIT.

    Returns:
        A port in 12000..31999, below the ephemeral range of Linux (32768-60999).
    """
    return _LOW + (job % _SLOTS) * _PORTS_PER_SLOT + generation % _PORTS_PER_SLOT


def check_port(port: int) -> None:
    """Raise early, on rank 0, with words, what the process group would say with a stack trace.

    Raises:
        DistributedError: something else listens on `port` of this host.
    """
    with socket.socket(socket.AF_INET6 if socket.has_ipv6 else socket.AF_INET) as probe:
        # As the TCP store binds: a port in TIME_WAIT is fine, a listening one is not.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
            probe.listen(1)
        except OSError as error:
            raise DistributedError(
                f"port {port} on {socket.gethostname()} is taken ({error.strerror}): another "
                "process listens there; set MASTER_PORT to a free one"
            ) from error
