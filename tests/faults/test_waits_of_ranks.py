"""Who is named when all ranks wait in collective operations of GPUs.

`tests/corpus/flight_recorder` has what torch 2.13 recorded of rank 0 of two on gloo, while rank 1
slept. No GPU was there: what NCCL records was made of it by hand, by the same format (2.10).
"""

import json
import pickle
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import distributed_c10d
from torch.distributed.flight_recorder.components import builder, config_manager, loader

from hpctrain.base.names.run_record import AttemptKey, Hang
from hpctrain.cluster.ranks.flight_recorder import PREFIX
from hpctrain.cluster.ranks.ranks import RankInfo
from hpctrain.engine.faults import observed
from hpctrain.engine.faults import process_state as states
from hpctrain.engine.faults.collectives import where
from hpctrain.engine.faults.observer import _Node, _Observer
from hpctrain.engine.faults.process_state import ObserverSettings
from tests.conftest import ROOT

RECORDED = ROOT / "tests/corpus/flight_recorder/torch-2.13-gloo.json"


def of_nccl(recorded: bytes, entered: int = 5) -> bytes:
    """Return what NCCL would have recorded of the same operations, and of later ones."""
    trace = json.loads(recorded.replace(b'"gloo:', b'"nccl:'))
    entries = trace["entries"]
    for group in trace["pg_status"]:  # which gloo leaves out
        trace["pg_config"][group] = {"name": group, "desc": "", "ranks": "[0, 1]"}
    for number in range(5, entered + 1):  # the host of a GPU runs ahead
        more = {"record_id": number, "collective_seq_id": number, "op_id": number}
        entries.append(entries[-1] | more | {"time_created_ns": entries[-1]["time_created_ns"] + 1})
    return json.dumps(trace).encode()


@pytest.fixture
def recorders(monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    """What the functions of torch return; the groups are those of the recording."""
    nothing = RECORDED.read_bytes().replace(b'"entries"', b'"none"')
    dumps = dict.fromkeys(("_dump_fr_trace_json", "_dump_nccl_trace_json"), nothing)
    for name in dumps:
        read = partial(dumps.get, name)
        monkeypatch.setattr(torch._C._distributed_c10d, name, read, raising=False)
    groups = [type("Group", (), {"group_name": name})() for name in "012"]
    ranks = {group: {0: 0, 1: 1} for group in groups}
    monkeypatch.setattr(distributed_c10d, "_pg_group_ranks", ranks)
    return dumps


def test_both_recorders_of_torch_are_read(recorders: dict[str, bytes]) -> None:
    gloo = RECORDED.read_bytes()
    recorders["_dump_fr_trace_json"] = gloo
    found = where(2)
    assert found["waits_in"] == "all_reduce number 4 of all ranks"
    assert found["open"] == ["gloo:0"]
    assert found["entered"] == {"gloo:2": 0, "gloo:1": 1, "gloo:0": 4}
    recorders["_dump_nccl_trace_json"] = of_nccl(gloo, 7)
    found = where(2)
    assert found["open"] == ["gloo:0", "nccl:0"]
    assert found["entered"]["nccl:0"] == 7
    assert found["entered"]["gloo:0"] == 4
    # Later versions of torch return everything by each function.
    both = json.loads(recorders["_dump_nccl_trace_json"])
    both["entries"] += json.loads(gloo)["entries"]
    recorders.update(dict.fromkeys(recorders, json.dumps(both).encode()))
    assert {**where(2), "recorded": None} == {**found, "recorded": None}
    # A process may train again, with a group of the same name.
    again = json.loads(gloo)
    first = again["entries"][0] | {"record_id": 9, "time_created_ns": 2**62}
    again["entries"].append(first)
    recorders.update(dict.fromkeys(recorders, json.dumps(again).encode()))
    assert where(2)["waits_in"] == ""
    # NCCL's watchdog looks ten times a second; the state is asked for with the dump.
    done = of_nccl(gloo).replace(b'"scheduled"', b'"completed"')
    assert "entries" in json.loads(done)
    recorders.update(dict.fromkeys(recorders, done))
    assert where(2)["waits_in"] == ""
    assert where(2)["open"] == []


class Page:
    """What `_answer` needs of a page."""

    where = staticmethod(lambda: where(2))

    def __init__(self) -> None:
        self.told = dict[str, Any]()

    def tell(self, answer: dict[str, Any]) -> None:
        self.told = answer


def test_a_late_rank_writes_what_torchs_own_tool_reads(
    recorders: dict[str, bytes], tmp_path: Path
) -> None:
    """The watchdog of NCCL would do it after `parallel.timeout_s`, when the rank is dead."""
    recorders["_dump_nccl_trace_json"] = of_nccl(RECORDED.read_bytes())
    for rank in (0, 1):
        page: Any = Page()
        observed._answer(page, tmp_path / f"{PREFIX}{rank}")
        assert "recorded" not in page.told
    args = config_manager.JobConfig().parse_args([f"--prefix={PREFIX}", str(tmp_path)])
    details, version = loader.read_dir(args)
    database = builder.build_db(details, args, version)
    assert {call.pass_check for call in database.collectives} == {True}
    assert len(pickle.loads((tmp_path / f"{PREFIX}0").read_bytes())["entries"]) == 6


RANKS = RankInfo("slurm", 0, 0, 0, 8, 4, 2, "localhost", 1)


def judged(folder: Path, entered: dict[int, dict[str, int]], *opened: str) -> Hang:
    """Return whom the observer names, if eight ranks wait; all have entered 29 without a word."""
    observer = _Observer(folder, ObserverSettings(ranks=RANKS, floor_s=60.0, timeout_s=600.0))

    def hang(rank: int) -> Hang:
        return Hang(
            **RANKS.attempt_key._asdict(),
            sentence=f"rank {rank} hangs: it waits for other ranks in all_reduce",
            rank=rank,
            host=f"node{rank // 4}",
            state=states.COLLECTIVE,
            step=100,
            phase="step",
            seconds=70.0,
            late=True,
            waits_in="all_reduce number 29 of all ranks",
            open=opened or ("nccl:0",),
            operations={"nccl:0": 29, "gloo:0": 3 + rank} | entered.get(rank, {}),
        )

    (folder / "logs" / "observed").mkdir(parents=True)
    for node in (0, 1):
        ranks = tuple(range(4 * node, 4 * node + 4))
        hangs = tuple(map(hang, ranks))
        facts = _Node(
            key=AttemptKey(), beat=1, host=f"node{node}", ranks=ranks, ended=0, hangs=hangs
        )
        observer._seen[node] = facts, 100.0
    observer._stepped = 100.0
    observer._judge(100.0)
    assert observer._named is not None
    return observer._named


def test_the_rank_that_has_not_entered_what_others_wait_in_is_named(tmp_path: Path) -> None:
    one = judged(tmp_path / "one", {5: {"nccl:0": 28}})
    assert (one.rank, one.host) == (5, "node1")
    assert one.sentence.endswith(
        "; ranks 0, 1, 2, 3, 4, 6, 7 wait in all_reduce number 29 of all ranks"
    )
    # By groups: rank 6 has entered more of another one, and a sum would hide what it lacks.
    groups = {6: {"nccl:0": 28, "nccl:4": 9}, 7: {"nccl:4": 2}}
    assert judged(tmp_path / "groups", groups).rank == 6
    # Nobody waits in the group of gloo, so its numbers say nothing.
    assert judged(tmp_path / "none", {}).host == ""


def test_nobody_is_named_if_all_have_entered_the_same(tmp_path: Path) -> None:
    """The GPU of rank 5 hangs in a kernel: all hosts have run ahead to the same operation."""
    found = judged(tmp_path, {})
    assert (found.host, found.at) == ("", "")
    assert found.sentence.startswith("all ranks wait for each other, and none has entered fewer")
    assert "a GPU, or the network between them, does not get on" in found.sentence
    where = "there wait rank 0 in all_reduce number 29 of all ranks"
    assert found.sentence.endswith(f"After step 100, for 70 s in the phase step, {where}")


def test_recordings_of_the_ranks_go_through_the_judge(
    recorders: dict[str, bytes], tmp_path: Path
) -> None:
    """What NCCL would have recorded of eight ranks; rank 6 has begun one operation less."""

    def told(entered: int) -> dict[str, Any]:
        recorders["_dump_nccl_trace_json"] = of_nccl(RECORDED.read_bytes(), entered)
        return where(2)

    ahead, behind = told(7), told(6)
    assert ahead["open"] == ["nccl:0"]
    entered = dict.fromkeys(range(8), ahead["entered"]) | {6: behind["entered"]}
    assert judged(tmp_path / "one", entered, *ahead["open"]).rank == 6
    entered[6] = ahead["entered"]
    assert judged(tmp_path / "none", entered, *ahead["open"]).host == ""


COMPILER = "/venv/lib/python3.11/site-packages/torch/_inductor/compile_fx.py"


def test_a_backward_pass_that_autograd_compiles_may_last() -> None:
    """On a GPU that is in a thread of its own, and the main thread only waits in `backward`."""
    begun, over = threading.Event(), threading.Event()
    names: dict[str, Any] = {}
    source = "def compile_fx_inner(begun, over):\n    begun.set()\n    over.wait()\n"
    exec(compile(source, COMPILER, "exec"), names)
    page: Any = Page()
    page.where = dict
    observed._answer(page)
    assert page.told["may_last"] is False
    thread = threading.Thread(target=names["compile_fx_inner"], args=(begun, over))
    thread.start()
    begun.wait()
    observed._answer(page)
    over.set()
    thread.join()
    assert page.told["may_last"] is True
