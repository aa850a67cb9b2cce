"""The port on which rank 0 listens."""

from __future__ import annotations

import socket

from hpctrain.errors import DistributedError

# Below every usual ephemeral range (Linux: 32768-60999) and above the well-known services.
_LOW = 12_000
_SLOTS = 5_000
_PORTS_PER_SLOT = 4


def master_port(job: int, generation: int = 0) -> int:
    """Return the port of rank 0. Every rank computes the same one without communication.

    A job has a slot of four ports, given by its number, so two jobs on one node collide only if
    their numbers differ by a multiple of 5,000. Within the slot, successive restarts and parallel
    steps (`generation`) use different ports, because the port of the previous restart may still be
    in TIME_WAIT.

    Args:
        job: The job id.
        generation: Number of the restart or of the job step.

    Returns:
        A port in 12000..31999, below the ephemeral range of Linux (32768-60999).
    """
    return _LOW + (job % _SLOTS) * _PORTS_PER_SLOT + generation % _PORTS_PER_SLOT


def check_port(port: int) -> None:
    """Check on rank 0 that the port is free, for a clearer message than that of the process group.

    Raises:
        DistributedError: Another process listens on `port` of this host.
    """
    with socket.socket(socket.AF_INET6 if socket.has_ipv6 else socket.AF_INET) as probe:
        # Bind like the TCP store: a port in TIME_WAIT is free, one that is listened on is not.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
            probe.listen(1)
        except OSError as error:
            raise DistributedError(
                f"port {port} on {socket.gethostname()} is taken ({error.strerror}): another "
                "process listens there; set MASTER_PORT to a free one"
            ) from error
