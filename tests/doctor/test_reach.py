"""Tests of TCP between the nodes of a check. A node is a thread here, with an address of its own.

What cannot be reached are real ports: one on which nobody listens, and one whose queue is full, so
that the kernel answers no more. Nodes with a network are in test_nodes_cluster.py.
"""

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from hpctrain.cluster.ranks.ranks import RankInfo
from hpctrain.errors import PortTakenError
from hpctrain.insight.doctor import comparison, exclusion
from hpctrain.insight.doctor.checks import reach
from hpctrain.insight.doctor.checks.reach import Lost
from hpctrain.insight.doctor.probe import Probe

ADDRESSES = ("127.0.0.1", "127.0.0.2", "127.0.0.3")


@pytest.fixture(autouse=True)
def names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each thread be a host with a name of its own."""
    monkeypatch.setattr(reach.socket, "gethostname", lambda: threading.current_thread().name)


@pytest.fixture
def silent() -> Iterator[int]:
    """Yield a port of 127.0.0.3 that answers nobody."""
    with ExitStack() as stack:
        full = stack.enter_context(socket.socket())
        full.bind((ADDRESSES[2], 0))
        full.listen(0)
        for _ in range(4):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(full.getsockname())
        yield full.getsockname()[1]


def free_port() -> int:
    with socket.create_server((ADDRESSES[0], 0)) as found:
        port: int = found.getsockname()[1]
    return port


def started(folder: Path, nodes: list[int], ranks: int = 1) -> dict[int, Lost | None]:
    """Let the ranks of these nodes, of three, find what they reach; return what each says."""
    found: dict[int, Lost | None] = {}
    port = free_port()

    def rank(node: int, local: int) -> None:
        number = node * ranks + local
        info = RankInfo(
            "slurm", number, local, node, 3 * ranks, ranks, 3, ADDRESSES[0], port, ADDRESSES
        )
        found[number] = reach.lost(info, folder, start_s=5)

    threads = [
        threading.Thread(target=rank, args=(node, local), name=f"node{node}")
        for node in nodes
        for local in range(ranks)
    ]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    return found


def test_all_nodes_reach_each_other(tmp_path: Path) -> None:
    well: Lost = {f"node{n}": {} for n in range(3)}
    assert started(tmp_path, [0, 1, 2], ranks=2) == dict.fromkeys(range(6), well)
    assert {one.result for one in reach.judged(well, well).values()} == {"pass"}


def test_a_node_that_is_not_reached(
    tmp_path: Path, silent: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All ranks say the same, and the node is to blame, whether it refuses or is silent."""
    monkeypatch.setattr(reach, "_CONNECT_S", 0.3)
    for port, why in (
        (silent, "127.0.0.3: no answer within 0.3 s"),
        (free_port(), "127.0.0.3: Connection refused"),
    ):
        folder = tmp_path / str(port)
        folder.mkdir()
        # The third node has come, and finds that it reaches the others.
        (folder / "listens-2.json").write_text(json.dumps(["node2", None, port]))
        (folder / "lost-2.json").write_text(json.dumps({"node2": {}}))
        found = started(folder, [0, 1])
        assert found[0] == found[1]
        lost = found[0]
        assert lost is not None
        assert [*lost["node0"], *lost["node1"], *lost["node2"]] == ["node2", "node2"]
        assert lost["node0"]["node2"] == why
        judged = reach.judged(lost, lost)
        assert {host: one.result for host, one in judged.items()} == {
            "node0": "pass",
            "node1": "pass",
            "node2": "fail",
        }
        assert f"node1 does not reach node2 ({why})" in judged["node2"].found
        assert [*exclusion.at_fault({host: [one] for host, one in judged.items()})] == ["node2"]


def test_of_a_pair_nobody_knows_which_one_is_to_blame() -> None:
    """The pair is named on both nodes, and none of them is excluded."""
    lost: Lost = {"a": {}, "b": {"c": "timed out"}, "c": {"b": "timed out"}, "d": {}}
    looks = [Probe(host, n, 0, {}, [], [], lost=lost) for n, host in enumerate(lost)]
    places = comparison.compared(looks)
    bad = {host: [one for one in found if one.result == "fail"] for host, found in places.items()}
    assert not bad["a"]
    assert not bad["d"]
    assert bad["b"] == bad["c"]
    assert bad["b"][0].found == "b and c do not reach each other (timed out)"
    assert exclusion.at_fault(places) == {}
    only = reach.judged({"b": {"c": "timed out"}, "c": {}}, ["b", "c"])
    assert {one.check for one in only.values()} == {"communication of a pair of nodes"}
    assert only["c"].found == "b does not reach c (timed out)"


def test_ranks_that_cannot_meet_do_not_wait(tmp_path: Path) -> None:
    """The port of rank 0 is taken, which it tells the others."""
    reach.tell(tmp_path, None)
    assert started(tmp_path, [1, 2]) == {1: None, 2: None}
    with socket.create_server((ADDRESSES[0], 0)) as other:
        taken = RankInfo("slurm", 0, 0, 0, 3, 1, 3, ADDRESSES[0], other.getsockname()[1], ADDRESSES)
        with pytest.raises(PortTakenError):
            reach.lost(taken, tmp_path, start_s=1)
