"""Which nodes reach each other by TCP, before a process group needs it and waits for minutes.

    first rank of a node   listens ── FOLDER/listens-2.json ── connects to all other nodes
    node 0                 FOLDER/lost-1.json, lost-2.json ... ── FOLDER/lost.json
    every rank             reads lost.json, so that all decide alike

A connection needs no Python of the other node: its kernel answers.
"""

import json
import os
import socket
import time
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import psutil
from msgspec import Meta

from hpctrain.base.files.disk import write_atomically
from hpctrain.base.files.record import read
from hpctrain.base.terminal.terminal import few
from hpctrain.cluster.ranks.port import listen
from hpctrain.cluster.ranks.ranks import RankInfo
from hpctrain.errors import DamageError
from hpctrain.insight.doctor.finding import Finding, good

Lost = dict[str, dict[str, str]]
_Place = tuple[str, str | None, Annotated[int, Meta(ge=0, le=65535)]]  # name, address, port
_CONNECT_S = 5.0  # the kernel tries again after 1 and 3 seconds
_TOLD = "lost.json"


def lost(
    ranks: RankInfo, folder: Path, interface: str | None = None, *, start_s: float = 60.0
) -> Lost | None:
    """Return which nodes each node does not reach, and why; all ranks call it, and get the same.

    It is None if the ranks cannot meet: node 0 has told nothing, or that it has no port. All ranks
    see the folder. A node with the interface `network.interface` is reached at its address.
    `start_s` is the time until the first ranks of all nodes have come here.
    """
    if ranks.local_rank == 0:
        _try_all(ranks, folder, os.environ.get("GLOO_SOCKET_IFNAME") or interface or "", start_s)
    told: Lost | None = _read(Lost | None, folder, [_TOLD], 2 * start_s).get(0)
    return told


def tell(folder: Path, found: Any, name: str = _TOLD) -> None:
    """Write what other ranks wait for; `lost.json` with None tells that they cannot meet."""
    write_atomically(folder / name, json.dumps(found), sync=False)


def _try_all(ranks: RankInfo, folder: Path, interface: str, start_s: float) -> None:
    own, name = ranks.node_rank, socket.gethostname()
    others = [node for node in range(ranks.num_nodes) if node != own]
    # The ranks will meet at the port of rank 0.
    where = ("", 0) if own else (ranks.master_addr, ranks.master_port)
    with listen(*where, only_here=False) as listening:
        known = psutil.net_if_addrs().get(interface, [])
        address = next((each.address for each in known if each.family == socket.AF_INET), None)
        tell(folder, [name, address, listening.getsockname()[1]], f"listens-{own}.json")
        places = _read(_Place, folder, [f"listens-{node}.json" for node in others], start_s)
        with ThreadPoolExecutor(32) as pool:
            tried = pool.map(lambda i: _tried(ranks, others[i], places.get(i)), range(len(others)))
            found = {name: {host: why for host, why in tried if why}}
        if own:
            tell(folder, found, f"lost-{own}.json")
            _read(Lost | None, folder, [_TOLD], start_s)  # the others may still connect
            return
        lost = [f"lost-{node}.json" for node in others]
        for told in _read(Lost, folder, lost, start_s).values():
            found |= told
    tell(folder, found)  # the port is free again


def _tried(ranks: RankInfo, node: int, place: Any) -> tuple[str, str]:
    """Return the name of a node, and why it is not reached; "" if it is."""
    known = ranks.host(node * ranks.local_world_size) or f"node {node} of the job"
    if place is None:
        return known, "it did not come to the check"
    name, address, port = place
    host = ranks.master_addr if node == 0 else address or (known if ranks.hosts else name)
    try:
        socket.create_connection((host, port), _CONNECT_S).close()
    except OSError as error:  # TimeoutError has no text of the system
        return name, f"{host}: {error.strerror or f'no answer within {_CONNECT_S:g} s'}"
    return name, ""


def _read(kind: Any, folder: Path, names: list[str], seconds: float) -> dict[int, Any]:
    """Wait for files, until all is told; return the content of those that have come, by number."""
    found: dict[int, Any] = {}
    end, nap, told = time.monotonic() + seconds, 0.01, False
    while len(found) < len(names) and time.monotonic() < end and not told:
        time.sleep(nap)
        nap = min(2 * nap, 0.5)
        # Without listing it, a network file system remembers that there was no such file.
        told = _TOLD in os.listdir(folder)
        for number, name in enumerate(names):
            if number not in found:
                with suppress(FileNotFoundError, DamageError):
                    found[number] = read(kind, folder / name)
    return found


def judged(lost: Lost, hosts: Iterable[str]) -> dict[str, Finding]:
    """Return a finding for each host of what `lost` has returned.

    A node that does not reach most of the others is to blame, and they are well. Of a pair nobody
    can tell which one is.
    """
    names, said = [*hosts], dict[tuple[str, str], str]()
    for a, found in sorted(lost.items()):
        for b, why in sorted(found.items()):
            does = f"{a} and {b} do not reach each other" if a in lost.get(b, {}) else ""
            said.setdefault((min(a, b), max(a, b)), f"{does or f'{a} does not reach {b}'} ({why})")
    count = Counter(host for pair in said for host in pair)
    ill = {host for host in names if count[host] > max(1.0, (len(names) - 1) / 2)}
    findings = {}
    for host in names:
        own = [t for pair, t in said.items() if host in pair and (host in ill or not ill & {*pair})]
        findings[host] = good("TCP to other nodes", "all are reached")
        if own:
            findings[host] = Finding(
                "TCP to other nodes" if host in ill else "communication of a pair of nodes",
                "fail",
                few(own, 4, "; "),
                "every node reaches every other one",
                "Ask the administrators about routes and firewalls between these nodes, or choose "
                "another network (network.interface).",
            )
    return findings
