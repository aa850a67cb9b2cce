"""The port on which rank 0 listens."""

import errno
import ipaddress
import os
import socket
from contextlib import suppress
from pathlib import Path

from hpctrain.base.errors import PortTakenError

# Below every usual ephemeral range (Linux: 32768-60999) and above the well-known services.
_LOW = 12_000
_SLOTS = 5_000
_PORTS_PER_SLOT = 4
_STRIDE = 1237  # a prime, so that all slots come before one comes again
_BACKLOG = 16_384  # of connections; the kernel may allow fewer
# After 20 s of silence, every 10 s, four times.
_ASKS = (socket.TCP_KEEPIDLE, 20), (socket.TCP_KEEPINTVL, 10), (socket.TCP_KEEPCNT, 4)


def master_port(job: int, generation: int = 0) -> int:
    """Return the port of rank 0. Every rank computes the same one without communication.

    A job has a slot of four ports, given by its number, so two jobs on one node collide only if
    their numbers differ by a multiple of 5,000. Within the slot, successive restarts and parallel
    steps (`generation`) use different ports, because the port of the previous restart may still be
    in TIME_WAIT. More than four use the slots of distant jobs, too: many runs may share the job.
    """
    more, place = divmod(generation, _PORTS_PER_SLOT)
    return _LOW + (job + more * _STRIDE) % _SLOTS * _PORTS_PER_SLOT + place


def listen(host: str, port: int, only_here: bool) -> socket.socket:
    """Return the socket on which rank 0 waits for the others, at the address that they connect to.

    The other networks of the node cannot connect then. Where the name of the host means another
    address here than on the other nodes (127.0.1.1, or one that this host does not have), all of
    its addresses are listened on. With `only_here` all ranks are on this node. A port that
    another process has is a PortTakenError.
    """
    addresses = _addresses(host, port, only_here)
    for address in addresses:
        try:
            return socket.create_server(
                address,
                family=socket.AF_INET6 if ":" in address[0] else socket.AF_INET,
                backlog=_BACKLOG,
                dualstack_ipv6=address[0] == "::",
            )
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL and address != addresses[-1]:
                continue
            why = os.strerror(error.errno or 0)
            raise PortTakenError(
                f"port {port} on {socket.gethostname()} is taken ({why}): another process listens "
                "there; set MASTER_PORT to a free one"
            ) from error
    raise AssertionError("there is always the address of all networks")


def keep_alive(port: int) -> None:
    """Let Linux ask the other end of this process's connections to a port whether it is there.

    Without an answer for a minute, what waits there fails. torch asks nobody: where a network is
    cut, its store would wait for ever.
    """
    for name in os.listdir("/proc/self/fd"):
        if not Path(f"/proc/self/fd/{name}").is_socket():
            continue  # its copy would stay open
        with suppress(OSError), socket.socket(fileno=os.dup(int(name))) as one:
            if one.family == socket.AF_UNIX or one.getpeername()[1] != port:
                continue
            one.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in _ASKS:
                one.setsockopt(socket.IPPROTO_TCP, option, value)


def _addresses(host: str, port: int, only_here: bool) -> list[tuple[str, int]]:
    """Return the address of the host, if it is certain, and then the one of all networks."""
    try:
        found = {str(entry[4][0]) for entry in socket.getaddrinfo(host, port)}
    except OSError:
        found = set()
    everywhere = "::" if socket.has_dualstack_ipv6() else "0.0.0.0"
    loopback = any(ipaddress.ip_address(each.partition("%")[0]).is_loopback for each in found)
    certain = len(found) == 1 and (only_here or not loopback)
    return [(address, port) for address in (*(found if certain else ()), everywhere)]
