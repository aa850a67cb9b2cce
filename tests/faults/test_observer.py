"""The observer of a node names the rank that does not get on, and what holds it.

The ranks are small programs that make the marks of a training; the limits are made short by the
keys of `hang`. Each waits in its own way, and all of them at the same time.
"""

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from subprocess import PIPE, Popen
from typing import Any

import torch
import torch.distributed as dist

from hpctrain.base.files.record import written
from hpctrain.base.names.run_record import AttemptKey, Hang
from hpctrain.base.processes import marks
from hpctrain.base.processes.child import Process
from hpctrain.cluster.ranks.ranks import RankInfo
from hpctrain.config.schema import HangConfig
from hpctrain.data.workers.pool import stacks
from hpctrain.engine.distributed import long_work
from hpctrain.engine.distributed.long_work import first_in_long_work
from hpctrain.engine.faults import process_state as states
from hpctrain.engine.faults.collectives import where
from hpctrain.engine.faults.limits import Limits
from hpctrain.engine.faults.observed import observed
from hpctrain.engine.faults.observer import ObserverSettings, _Node, _Observer
from hpctrain.engine.faults.process_state import PagePlace
from tests.faults.disturbed import command_line, descendants
from tests.ranks import run_ranks

PROGRAM = """\
import ctypes, os, signal, sys, time
from pathlib import Path
from hpctrain.base.processes import marks
from hpctrain.cluster.ranks.ranks import RankInfo
from hpctrain.config.schema import HangConfig
from hpctrain.engine.faults.observed import observed
from hpctrain.cluster.ranks.ranks import RankInfo

HOW = {
    "stopped": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "dead": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "lock": lambda: ctypes.PyDLL(None).read(os.pipe()[0], ctypes.create_string_buffer(1), 1),
    "asleep": lambda: time.sleep(600),
}
logs, how = Path(sys.argv[1]), sys.argv[2]
ranks = RankInfo("single", job_id="7", step_id=2)
with observed(HangConfig(floor_s=1.5), logs, ranks, 60):
    marks.begin_step()
    for step in range(1, 40):
        time.sleep(0.1)
        marks.stepped(step)
    HOW[how]()
"""


@contextmanager
def program(folder: Path, how: str) -> Iterator[Popen[str]]:
    """Start the program with a run directory of its own, and end it."""
    (folder / how / "logs").mkdir(parents=True)
    command = [sys.executable, "-c", PROGRAM, str(folder / how / "logs"), how]
    with Popen(command, stdout=PIPE, text=True, cwd=folder) as process:
        try:
            yield process
        finally:
            process.kill()


def wait_for(fact: Callable[[], Any], what: str) -> Any:
    """Wait until a fact is there, for as long as a busy machine may need."""
    end = time.monotonic() + 200
    while time.monotonic() < end:
        if found := fact():
            return found
        time.sleep(0.05)
    raise AssertionError(f"no {what}")


def verdict(run: Path) -> Hang:
    """Return what the observer has said."""
    found: Hang = wait_for(lambda: Hang.of(run, AttemptKey("7", 0, 2), 0), f"verdict in {run}")
    assert f"pid {pid_of(run)}" in found.sentence
    return found


def pid_of(run: Path) -> int:
    place: dict[str, int] = json.loads((run / "logs/observed/node0.0").read_text())
    return place["pid"]


def test_what_holds_a_rank_is_told_apart(tmp_path: Path) -> None:
    ways = ("stopped", "dead", "lock")
    running = [program(tmp_path, how) for how in ways]
    for each in running:
        each.__enter__()
    said = {how: verdict(tmp_path / how) for how in ways}
    for each in running:
        each.__exit__(None, None, None)
    assert {how: hang.state for how, hang in said.items()} == {
        "stopped": states.STOPPED,
        "dead": states.DEAD,
        "lock": states.HOLDS_LOCK,
    }
    for how, hang in said.items():
        assert (hang.rank, hang.step, hang.phase, hang.step_id) == (0, 39, "step", 2)
        assert hang.sentence.startswith(f"rank 0 ({hang.host}, pid "), how
        assert "after step 39" in hang.sentence
    # The line of the user, of the stacks that C has written.
    assert said["lock"].at == "<string>:12 in <lambda>"
    assert ", and sleeps" in said["lock"].sentence
    assert "Current thread" in (tmp_path / "lock/logs/observed/rank0.stacks").read_text()
    assert not (tmp_path / "dead/logs/observed/rank0.stacks").exists()
    assert "has died after step 39, in the phase step" in said["dead"].sentence


def test_an_observer_that_is_killed_is_followed_by_another(tmp_path: Path) -> None:
    """Else the observer of the first node would take this node for silent."""
    with program(tmp_path, "asleep") as process:

        def observers() -> set[int]:
            found = {*descendants(process.pid)}
            return {pid for pid in found if "hpctrain.engine.faults.observer" in command_line(pid)}

        (killed,) = wait_for(observers, "observer")
        os.kill(killed, signal.SIGKILL)
        wait_for(lambda: observers() - {killed}, "other observer")


def two_ranks(folder: str) -> str:
    """Make some steps; then rank 1 hangs until it is named, and rank 0 waits for it."""
    rank, run = dist.get_rank(), Path(folder)
    place = RankInfo("torchrun", rank, rank, 0, 2, 2, job_id="7", step_id=2)
    group = dist.new_group([0, 1], timeout=timedelta(seconds=100))
    try:
        with observed(HangConfig(1.5), run / "logs", place, 60):
            marks.open_page().where = partial(where, 2, stacks)
            marks.begin_step()
            for step in range(1, 25):
                time.sleep(0.1)
                dist.all_reduce(torch.ones(2), group=group)
                marks.stepped(step)
            if rank == 1:
                observed_of = run / "logs" / "observed"
                files = [run / "hang.json", *(observed_of / f"rank{n}.stacks" for n in (0, 1))]
                while not all(file.exists() for file in files):
                    time.sleep(1)
            dist.all_reduce(torch.ones(2), group=group)
    except RuntimeError as error:
        return str(error)
    finally:
        marks.open_page().where = dict
    return ""


def test_the_late_rank_is_the_cause_and_not_the_one_that_waits_for_it(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    with ThreadPoolExecutor(1) as pool:  # they may get on again, and then it is taken back
        said = pool.submit(wait_for, lambda: Hang.of(tmp_path, AttemptKey("7", 0, 2), 0), "hang")
        assert run_ranks(two_ranks, 2, str(tmp_path)) == ["", ""]
        hang = said.result()
    assert (hang.rank, hang.state, hang.step) == (1, states.ASLEEP, 24)
    assert f"at {__file__}:" in hang.sentence
    if "; rank 0 waits" in hang.sentence:  # its limit may have passed later
        assert hang.sentence.endswith("; rank 0 waits in all_reduce number 25 of all ranks")
    # Both have written their stacks, and went on.
    for rank in (0, 1):
        assert "in two_ranks" in (tmp_path / f"logs/observed/rank{rank}.stacks").read_text()
    known = json.loads((tmp_path / "logs/observed/limits.json").read_text())
    assert known["step"]["floor_s"] >= 4 * 1.5  # so that a wrong limit ends no second attempt


def test_the_first_batch_has_a_limit_once_it_is_known() -> None:
    page = marks.open_page()
    page.begin()
    looked = []

    def batches() -> Iterator[int]:
        looked.append(page.marks().long_work)
        yield 1

    for _ in range(2):
        marks.enter(marks.EVALUATION)
        assert [*first_in_long_work("the first batch", batches())] == [1]
        marks.enter(marks.STEP)
    assert looked == [1, 0]


def test_a_rank_that_waits_for_the_work_of_others_says_for_which(tmp_path: Path) -> None:
    assert run_ranks(waits_in_long_work, 2, str(tmp_path)) == ["the first batch", None]


def waits_in_long_work(folder: str) -> str | None:
    rank, said = dist.get_rank(), Path(folder) / "said"
    group = long_work.Group(dist.distributed_c10d._get_default_store(), rank, 2, 100.0)

    def ask() -> None:
        wait_for(lambda: long_work.waits_for, "wait")
        said.write_text(where(2)["waits_in"])

    with long_work.use(group), long_work.long_work("the first batch"):
        if rank == 0:
            threading.Thread(target=ask).start()
        else:
            wait_for(said.exists, "answer")
    return said.read_text() if rank == 0 else None


def test_limits_are_learned_kept_and_forgotten_after_a_death(tmp_path: Path) -> None:
    (tmp_path / "logs" / "observed").mkdir(parents=True)
    file = tmp_path / "logs" / "observed" / "limits.json"
    limits = Limits(file, 30.0, 600.0)
    assert limits.limit(0, marks.SAVE) is None  # nobody knows how long the first one takes
    for seconds in (1.0, 8.0, 9.0, 7.0):
        limits.learn(0, marks.SAVE, 1.0)
        limits.learn(1, marks.SAVE, seconds)
        limits.learn(1, marks.STEP, 0.1)
    assert limits.limit(0, marks.SAVE) == 30.0
    assert limits.limit(1, marks.SAVE) == 75.0
    limits.save()
    again = Limits(file, 30.0, 600.0)
    assert again.limit(0, marks.SAVE) == 75.0  # of the rank that takes the longest
    again.died(marks.SAVE, 80.0)
    third = Limits(file, 30.0, 600.0)
    assert third.limit(0, marks.SAVE) is None
    assert third.limit(0, marks.STEP) == 30.0
    for _ in range(30):
        third.learn(0, marks.SAVE, 1.0)
    assert third.limit(0, marks.SAVE) == 320.0
    third.died(marks.SAVE, 320.0)
    assert third.floor_s(marks.SAVE) == 600.0
    for _ in range(30):
        third.learn(0, marks.STEP, 7.0)
    third.learn(0, marks.STEP, 40.0)  # once, as a hook of every thousandth step
    assert third.limit(0, marks.STEP) == 120.0
    file.write_text("{")
    assert Limits(file, 30.0, 600.0).limit(0, marks.STEP) is None


def test_a_node_is_not_silent_while_steps_are_made(tmp_path: Path) -> None:
    """A step needs the ranks of all nodes: only the files of the other node do not come."""
    key = AttemptKey("7", 0, 2)
    ranks = RankInfo("slurm", 0, 0, 0, 2, 1, 2, job_id="7", step_id=2)
    job = ObserverSettings(ranks=ranks, floor_s=30.0, timeout_s=600.0)
    one = _Observer(tmp_path, job)
    one._seen = {1: (_Node(key=key, beat=1, host="b", ranks=(1,), ended=0, hangs=()), 100.0)}
    one._stepped = 120.0
    one._judge(145.0)
    assert one._named is None
    one._judge(151.0)
    assert one._named is not None
    assert (one._named.state, one._named.host) == (states.SILENT, "b")


def test_the_observer_of_a_run_ends_when_its_ranks_train_another_one(tmp_path: Path) -> None:
    job = ObserverSettings(ranks=RankInfo("slurm"), floor_s=30.0, timeout_s=600.0)
    observer, page, me = _Observer(tmp_path, job), marks.open_page(), Process.current()
    observer._folder.mkdir(parents=True)

    def begin(folder: Path) -> None:
        page.begin()
        place = PagePlace(0, me.pid, me.started, page.descriptor, page.marks().begun)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "node0.0").write_bytes(written(place).encode())

    page.begin()
    begin(observer._folder)
    page.begin()  # the file is of an attempt before
    observer._find_ranks()
    assert observer._ranks == {}
    begin(observer._folder)
    observer._find_ranks()
    assert not observer._ranks[0].has_ended
    # Between two looks the rank has ended, and begun with another run.
    marks.leave()
    begin(tmp_path / "other")
    assert observer._ranks[0].has_ended
