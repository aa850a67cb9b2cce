"""A checkpoint that a writer makes in the background is the one that the trainer would make."""

import logging
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import wait
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from hpctrain.base.names.step_names import step_name, step_of
from hpctrain.base.processes import marks
from hpctrain.base.processes.child import Child
from hpctrain.data.shards.types import Batch
from hpctrain.engine.checkpoint.checkpointer import Checkpointer
from hpctrain.engine.checkpoint.saving import saves as saves_module
from hpctrain.engine.checkpoint.saving.shared_memory import _REPORT, SharedMemory
from hpctrain.engine.faults.health import Health, RolledBack
from hpctrain.engine.faults.stop import Stop
from hpctrain.engine.part import Part
from hpctrain.engine.supervised.step import TrainStep
from hpctrain.errors import StorageError
from hpctrain.runs.checkpoints.manifest import Manifest, checkpoints, damage
from tests import forkserver
from tests.conftest import ROOT
from tests.ranks import run_ranks
from tests.steps import Every, alone, batch, here, make, trainer_of, weights
from tests.steps import step_of as training_step
from tests.training.test_late_numbers import ROWS, Late, Squares, numbers

pytestmark = pytest.mark.usefixtures("group_of_one", "writers_that_start_soon")
ROOM = 1 << 30


@pytest.fixture
def writers_that_start_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "Popen", forkserver.Popen)


def checkpointer(folder: Path, step: TrainStep) -> Checkpointer:
    """Return what saves a step; its writers are started, as small as the state is."""
    made = Checkpointer(folder, 2, here(), step.model, step.optimizer)
    made.saves.start_writers(ROOM)
    step.exchange.asking.append(made.saves)
    return made


def go_on(step: TrainStep, saved: Checkpointer, number: int = 0) -> None:
    """Train until the save under way is committed."""
    while saved.saves.under_way:
        step(batch(8, number), 1e-2)
        saved.saves.advance()


def test_a_save_in_the_background_tells_how_long_one_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the last save of a run, which stops it, would look like a rank that hangs."""
    monkeypatch.setattr(marks, "_rank", marks._rank)
    file = os.memfd_create("page")
    os.ftruncate(file, marks.SIZE)
    page = marks.Page(file)
    page.begin()

    @contextmanager
    def saving() -> Iterator[None]:
        marks.enter(marks.SAVE)
        yield
        marks.begin_step()

    step = make()
    saved = checkpointer(tmp_path, step)
    assert saved.saves.writer is not None
    os.kill(saved.saves.writer.process.pid, signal.SIGSTOP)
    with saving():
        saved.save(1, {}, background=True)
    began = time.monotonic()
    for _ in range(5):
        step(batch(8), 1e-2)
        saved.saves.advance(saving)
    assert page.stay(marks.SAVE)[0] == 1  # a step that only asks is none
    took = time.monotonic() - began
    os.kill(saved.saves.writer.process.pid, signal.SIGCONT)
    while saved.saves.under_way:
        step(batch(8), 1e-2)
        saved.saves.advance(saving)
    assert page.stay(marks.SAVE)[1] >= took
    saved.saves.close()


def contents(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.glob("*.distcp")}


def test_both_ways_write_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planned, plan = list[bool](), dcp.save
    monkeypatch.setattr(dcp, "save", lambda *a, **b: (planned.append(True), plan(*a, **b)))
    step = make(dropout=0.5)
    (tmp_path / "a").mkdir()
    saved = checkpointer(tmp_path / "a" / "checkpoints", step)
    assert saved.save(0, {})
    step(batch(8), 1e-2)  # the optimizer has a state from now on
    progress = {"step": 1, "metrics": {"x": 1.5}}
    random = torch.get_rng_state()
    assert saved.save(1, progress)
    torch.set_rng_state(random)
    os.rename(saved.path(1), tmp_path / "waited")
    assert saved.save(1, progress, background=True)
    progress["metrics"]["x"] = 2.0
    before = weights(step)
    go_on(step, saved)
    assert not torch.equal(weights(step), before), "the training went on"
    assert contents(saved.path(1)) == contents(tmp_path / "waited") != {}
    assert not damage(saved.path(1))
    found, other = Manifest.read(saved.path(1)), Manifest.read(tmp_path / "waited")
    assert found.progress == other.progress == {"step": 1, "metrics": {"x": 1.5}}
    assert [each.step for each in saved.saves.committed] == [0, 1, 1]
    assert len(planned) == 2, "what has the same layout as the save before is not planned anew"
    saved.saves.close()


def process_of(saved: Checkpointer) -> int:
    """Return the id of the writer, which has been stopped, so that nothing is written yet."""
    assert saved.saves.writer is not None
    os.kill(saved.saves.writer.process.pid, signal.SIGSTOP)
    return saved.saves.writer.process.pid


def test_a_killed_writer_costs_no_checkpoint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    step = make()
    step(batch(8), 1e-2)
    saved = checkpointer(tmp_path / "checkpoints", step)
    killed = process_of(saved)
    now = weights(step)
    saved.save(1, {"step": 1}, background=True)
    step(batch(8), 1e-2)
    saved.saves.advance()
    assert saved.saves.under_way is not None
    assert not checkpoints(saved.saves.folder)
    os.kill(killed, signal.SIGKILL)
    with caplog.at_level(logging.WARNING):
        go_on(step, saved)
    assert "the process that writes checkpoints ended with -9); it is written once" in caplog.text
    assert "was killed; it is started again" in caplog.text
    saved.save(2, {"step": 2}, background=True)
    go_on(step, saved)
    assert saved.saves.writer is not None
    assert saved.saves.writer.process.pid != killed
    assert [damage(path) for path in checkpoints(saved.saves.folder)] == ["", ""]
    (saved.path(2)).rename(tmp_path / "aside")
    assert saved.load_latest() == {"step": 1}
    assert torch.equal(weights(step), now)
    saved.saves.close()


def limit(process: int, size: int) -> None:
    resource.prlimit(process, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


def spoil(saved: Checkpointer) -> None:
    """Change what was copied, as if the copy had gone to other pages."""
    assert saved.saves.writer is not None
    saved.saves.writer._memory.bytes()[_REPORT : _REPORT + 64] ^= 255


def test_a_copy_that_is_not_the_state_is_never_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    step = make()
    step(batch(8), 1e-2)
    saved = checkpointer(tmp_path / "checkpoints", step)
    stopped = process_of(saved)
    saved.save(1, {"step": 1}, background=True)
    spoil(saved)
    os.kill(stopped, signal.SIGCONT)
    with pytest.raises(StorageError, match="is not what the rank has copied to it"):
        go_on(step, saved)
    assert not checkpoints(saved.saves.folder)
    # Where it is seen at once, the state is still there, and is written while the training waits.
    put = SharedMemory.put
    monkeypatch.setattr(SharedMemory, "put", lambda *a: (put(*a), spoil(saved)))
    with caplog.at_level(logging.WARNING):
        saved.save(2, {"step": 2}, background=True)
    assert "saves stop the training: what is in the memory for checkpoints is not" in caplog.text
    now = weights(step)
    go_on(step, saved)
    assert not damage(saved.path(2))
    other = make()
    assert Checkpointer(saved.saves.folder, 2, here(), other.model, other.optimizer).load_latest()
    assert torch.equal(weights(other), now)
    saved.saves.close()


def test_what_cannot_be_written_is_said_and_written_once_more(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A limit of the size of files stands for a full disk: it is one for one process alone."""
    step = make()
    step(batch(8), 1e-2)
    saved = checkpointer(tmp_path / "checkpoints", step)
    assert saved.saves.writer is not None
    limit(saved.saves.writer.process.pid, 1000)
    saved.save(1, {"step": 1}, background=True)
    with caplog.at_level(logging.WARNING):
        go_on(step, saved)
    said = "step-00000001.tmp: the checkpoint was not written (__0_0.distcp has the most bytes"
    assert said in caplog.text
    assert not damage(saved.path(1))
    # Something of this name stands in the way of the rename, and is gone at the second try.
    saved.path(2).write_text("")
    limit(saved.saves.writer.process.pid, resource.RLIM_INFINITY)
    saved.save(2, {"step": 2}, background=True)
    while (save := saved.saves.under_way) and not save.uncommitted:
        step(batch(8), 1e-2)
        saved.saves.advance()
    saved.path(2).unlink()
    go_on(step, saved)
    assert not damage(saved.path(2))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    saved.save(3, {"step": 3}, background=True)
    go_on(step, saved)
    for process in (os.getpid(), saved.saves.writer.process.pid):
        limit(process, 1000)
    try:
        saved.save(4, {"step": 4}, background=True)
        with pytest.raises(StorageError, match="the checkpoint was not written"):
            go_on(step, saved)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [damage(path) for path in checkpoints(saved.saves.folder)] == ["", ""]
    assert saved.load_latest() == {"step": 3}
    saved.saves.close()
    names = {path.name for path in saved.saves.folder.iterdir()}
    assert names == {"step-00000002", "step-00000003", "step-00000004.tmp"}, "step 1 is removed"


def test_a_rescue_does_not_wait_for_a_disk_that_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(saves_module, "_RESCUE_S", 0.0)
    monkeypatch.setattr(saves_module, "_LEAST_RATE", float("inf"))
    saved = checkpointer(tmp_path / "checkpoints", make())
    writer = process_of(saved)
    saved.save(1, {}, background=True)
    saved.saves.rescue()
    assert "the checkpoint was not written (it is not on the disk after 0 s)" in caplog.text
    os.kill(writer, signal.SIGCONT)
    saved.saves.close()


def test_a_writer_that_hangs_costs_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(saves_module, "_LONGEST_S", 0.0)
    monkeypatch.setattr(saves_module, "_SLOWEST", float("inf"))
    step = make()
    saved = checkpointer(tmp_path / "checkpoints", step)
    writer = process_of(saved)
    saved.save(1, {"step": 1}, background=True)
    saved.saves.finish()
    assert "is not on the disk after 0 s); it is written once more" in caplog.text
    assert saved.load_latest() == {"step": 1}
    saved.save(2, {"step": 2}, background=True)
    go_on(step, saved)
    assert saved.load_latest() == {"step": 2}
    assert not runs(writer)
    saved.saves.close()


def test_a_writer_that_cannot_be_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refused(_: Child) -> None:
        raise BlockingIOError("no more processes")

    step = make()
    saved = checkpointer(tmp_path / "checkpoints", step)
    assert saved.saves.writer is not None
    monkeypatch.setattr(Child, "_started", refused)
    saved.saves.writer.process.kill()
    saved.save(1, {}, background=True)
    go_on(step, saved)
    assert "the writer cannot be started: no more processes" in caplog.text
    assert not damage(saved.path(1))
    saved.saves.close()


def on_two_ranks(folder: Path) -> list[tuple[int, bool, list[str]]]:
    """Save while the writer of rank 1 is stopped for five steps; return what this rank saw."""
    rank = torch.distributed.get_rank()
    step = make()
    saved = checkpointer(folder / "checkpoints", step)
    writer = process_of(saved) if rank else 0
    step(batch(8), 1e-2)
    saved.save(1, {"step": 1}, background=True)
    found = []
    while saved.saves.under_way:
        step(batch(8), 1e-2)
        saved.saves.advance()
        if len(found) == 5 and rank:
            os.kill(writer, signal.SIGCONT)
        names = [path.name for path in checkpoints(saved.saves.folder)]
        found.append((len(found), saved.saves.under_way is None, names))
    saved.saves.close()
    return found


def test_the_sum_over_the_ranks_decides(tmp_path: Path) -> None:
    """What is offered stands for the sum with the flags of another rank."""
    step = make()
    saves = (saved := checkpointer(tmp_path / "checkpoints", step)).saves
    saved.save(1, {"step": 1}, background=True)
    assert saves.writer is not None
    while saves.writer.error is None:
        time.sleep(0.005)
    for others, committed, own in (
        ([1, 0, 0], False, [0, 0, 1]),
        ([0, 0, 0], False, [0, 0, 1]),  # a thread puts it together
        ([0, 0, 0], True, [0, 0, 0]),
    ):
        flags = saves.flags()
        saves.offer(torch.tensor(flags) + torch.tensor(others))
        saves.advance()
        assert bool(checkpoints(saves.folder)) is committed
        assert saves.under_way is not None
        assert saves.flags() == own
        if saves.under_way.complete is not None:
            wait([saves.under_way.complete])
    saves.offer(torch.tensor(saves.flags()))
    saves.advance()
    assert saves.under_way is None
    assert saves.flags() == [0, 0, 0]
    saves.close()


@pytest.mark.slow
def test_all_ranks_must_have_written_their_part(tmp_path: Path) -> None:
    first, second = run_ranks(on_two_ranks, 2, tmp_path)
    assert len(first) == len(second) > 6, "both saw the end at the same step"
    assert not any(names for _, _, names in first[:5] + second[:5])
    path = tmp_path / "checkpoints" / "step-00000001"
    assert first[-1][2] == [path.name]
    assert not damage(path)
    assert not [*path.glob(".part*")]


PROGRAM = """
import os, signal, sys
from pathlib import Path
from hpctrain.config.schema import ParallelConfig
from hpctrain.engine.distributed.group import process_group
from hpctrain.cluster.ranks.ranks import RankInfo
from tests.checkpoint.test_background_saves import batch, checkpointer, make, process_of

with process_group(RankInfo("single"), ParallelConfig(device="cpu")):
    step = make()
    step(batch(8), 1e-2)
    saved = checkpointer(Path(sys.argv[1]) / "checkpoints", step)
    saved.save(1, {"step": 1}, background=True)
    saved.saves.finish()
    print(process_of(saved), flush=True)
    saved.save(2, {"step": 2}, background=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.mark.slow
def test_a_killed_training_leaves_no_half_checkpoint_and_no_writer(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    done = forkserver.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    pid = int(done.stdout)
    while runs(pid):
        time.sleep(0.01)
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["step-00000001", "step-00000002.tmp"]
    step = make()
    resumed = Checkpointer(tmp_path / "checkpoints", 2, here(), step.model, step.optimizer)
    assert resumed.load_latest() == {"step": 1}


class Watching(Part):
    """Stops the writer in step 2, asks for `stop` in step 3 and lets the writer go on in step 4."""

    def __init__(self, stop: Stop | None) -> None:
        self.stop = stop
        self.saved: list[tuple[int, str, float]] = []
        self.writer = 0

    def after_step(self, step: int, batch: Batch) -> None:
        if step == 2:
            os.kill(self.writer, signal.SIGSTOP)
        if step == 3 and self.stop is not None:
            self.stop.asked = "SIGTERM"
        if step == 4:
            assert not self.saved
            os.kill(self.writer, signal.SIGCONT)

    def after_save(self, step: int, metrics: Mapping[str, float], folder: Path) -> None:
        assert not damage(folder)
        self.saved.append((step, folder.name, metrics["train/loss"]))


@pytest.mark.parametrize("late", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize("end", ["stop", "rollback", "end"])
def test_what_ends_a_run_waits_for_the_checkpoint_under_way(
    end: str, late: bool, tmp_path: Path
) -> None:
    """With `late` the flags of a step are read after the next one, as on a GPU."""
    torch.manual_seed(0)
    stop, health = Stop(), Health("rollback", run=tmp_path)
    model = alone(nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters, lr=0.1)
    task = Squares(stop, 0, 17 if end == "rollback" else None)  # the first sample of step 5
    step = training_step(model, task, optimizer, health=health, asking=[stop])
    hook = Watching(stop if end == "stop" else None)
    every = Every(log=1, checkpoint=2)
    folder = tmp_path / "checkpoints"
    trainer = trainer_of(step, folder, 6, every, loader=numbers(6), parts=[hook])
    saves = trainer.session.saving.checkpointer.saves
    saves.start_writers(ROOM)
    step.exchange.asking.append(saves)
    if late:
        saves._totals = Late([])
    assert saves.writer is not None
    hook.writer = saves.writer.process.pid
    if end == "rollback":
        with pytest.raises(RolledBack):
            trainer.fit()
    else:
        assert trainer.fit().finished is (end == "end")
    steps = {"stop": [2, 4], "rollback": [2, 4], "end": [2, 4, 6]}[end]
    assert sorted(step_of(path) for path in checkpoints(folder)) == steps
    told = [(number, name) for number, name, _ in hook.saved]
    assert told == [(n, step_name(n)) for n in steps]
    for number, _, loss in hook.saved:
        progress = Manifest.read(trainer.session.saving.checkpointer.path(number)).progress
        assert progress["step"] == progress["data"]["consumed"] // ROWS == number
        assert progress["metrics"]["train/loss"] == loss
    assert len({loss for *_, loss in hook.saved}) == len(hook.saved)
