"""Names, addresses, network interfaces, the port of rank 0, and the ports of InfiniBand.

/sys/class/infiniband/mlx5_0/ports/1/state              4: ACTIVE
                                     /rate               400 Gb/sec (4X NDR)
"""

import ctypes
import ipaddress
import os
import socket
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

from hpctrain.base.errors import DistributedError
from hpctrain.base.files.disk import text_of
from hpctrain.cluster.ranks.port import listen
from hpctrain.cluster.ranks.ranks import RankInfo
from hpctrain.insight.doctor.finding import Finding, bad, good, judged
from hpctrain.insight.site.surroundings import NET, interfaces

_INFINIBAND = Path("/sys/class/infiniband")
_LIBRARY = "libibverbs.so.1"
_VARIABLES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")


def host_name(ranks: RankInfo) -> Finding:
    """Check that the other nodes' names, and that of rank 0, have addresses here.

    A job of several nodes needs those of this node and of rank 0.
    """
    own = socket.gethostname()
    names = dict.fromkeys([own, *ranks.hosts, ranks.master_addr])
    lost = [name for name in names if not _addresses(name)]
    if lost:
        stops = ranks.num_nodes > 1 and not {own, ranks.master_addr}.isdisjoint(lost)
        found = f"no address for {', '.join(lost[:5])}"
        return bad("host names", "fail" if stops else "warn", found)
    addresses = sorted(_addresses(own))
    loops = all(ipaddress.ip_address(each).is_loopback for each in addresses)
    well, found = not loops or ranks.num_nodes == 1, f"{own} is {', '.join(addresses)}"
    return judged("own address", well, found, check="host names")


def _addresses(name: str) -> set[str]:
    """Return the addresses of a host name; none if it has none."""
    try:
        return {str(entry[4][0]).partition("%")[0] for entry in socket.getaddrinfo(name, None)}
    except OSError:
        return set()


def interface(
    chosen: str | None, nccl: bool, env: Mapping[str, str] = os.environ, net: Path = NET
) -> Iterator[Finding]:
    """Check that the interfaces exist, and are up, which NCCL and gloo are told to use.

    Variables of the environment have precedence over `network.interface`, which is `chosen`. That
    of NCCL matters if the job uses NCCL.
    """
    up = interfaces(net)
    asked = {name: env.get(name) or chosen for name in _VARIABLES[not nccl :]}
    for variable, text in asked.items():
        if not text or text[0] == "^":  # NCCL's word for all but these
            continue
        exact = text[0] == "="
        for name in text.lstrip("=").split(","):
            # NCCL compares only the beginnings of names, unless there is a `=`.
            fits = [one for one in up if one == name or (not exact and one.startswith(name))]
            if not fits:
                found, check = f"there are {', '.join(up)}", f"interface {name} ({variable})"
                yield bad("interface", "fail", found, check, name=name)
                return
    named = ", ".join(sorted({text for text in asked.values() if text}))
    yield good(
        "network interfaces", named or f"the choice is left to NCCL and gloo: {', '.join(up)}"
    )


def port(host: str, number: int, only_here: bool) -> Finding:
    """Check, on the node of rank 0 and before the ranks meet, that its port is free."""
    check = "port of rank 0"
    try:
        listen(host, number, only_here).close()
    except DistributedError as error:
        return bad(check, "fail", str(error))
    return good(check, f"{number} is free")


def _ports(folder: Path) -> list[Path]:
    return sorted(folder.glob("*/ports/*"))


def _is_active(port: Path) -> bool:
    return "ACTIVE" in text_of(port / "state")


def infiniband_rates(folder: Path = _INFINIBAND) -> str:
    """Return the rates of the active ports, which are the same on all nodes: `4 x 400 Gb/sec`."""
    counted = Counter(text_of(port / "rate").strip() for port in _ports(folder) if _is_active(port))
    return ", ".join(f"{count} x {rate}" for rate, count in sorted(counted.items())) or "none"


def uses_infiniband(folder: Path = _INFINIBAND, env: Mapping[str, str] = os.environ) -> bool:
    """Return whether NCCL between nodes would use these adapters, if their library works."""
    chosen = env.get("NCCL_NET", "IB").upper().startswith("IB")  # others are TCP and plug-ins
    on = chosen and env.get("NCCL_IB_DISABLE", "0") == "0"
    return on and any(map(_is_active, _ports(folder)))


def infiniband_library() -> Finding:
    """Check that the library can use the adapters, as NCCL would."""
    try:
        verbs, count = ctypes.CDLL(_LIBRARY), ctypes.c_int()
        verbs.ibv_get_device_list.restype = ctypes.c_void_p
        if found := verbs.ibv_get_device_list(ctypes.byref(count)):
            verbs.ibv_free_device_list(ctypes.c_void_p(found))
        why = "" if count.value else f"{_LIBRARY} has no provider for these adapters"
    except (OSError, AttributeError) as error:
        why = str(error)
    found = f"{why}: NCCL falls back to TCP" if why else "loads, and has the adapters"
    return judged("InfiniBand library", not why, found)
