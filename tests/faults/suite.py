"""The fault suite: a random event at a random moment, and the run must end as if undisturbed.

    make faults                          every event of this machine once, and 20 random kills
    make faults KILLS=300 SEED=7         more of them; the table is the last thing that is printed
    make faults CLUSTER=1                the events of the development cluster, too

Each event is one row of EVENTS or of ON_CLUSTER, printed as soon as it has happened. A row without
an action names the test that has the event already: `python -m tests.faults --list` shows them.
"""

import os
import random
import resource
import shutil
import signal
import statistics
import subprocess
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hpctrain.runs.checkpoints.manifest import checkpoints
from tests.faults.disturbed import (
    EVERY,
    RANKS,
    Training,
    alive,
    damage,
    descendants,
    differences,
    signal_to,
    wait_for,
)

Act = Callable[[Training, random.Random], None]
KILL, STOP = signal.SIGKILL, signal.SIGSTOP
OBSERVER, WRITER = "hpctrain.engine.faults.observer", "hpctrain.engine.checkpoint.saving.writer"
MOST_ATTEMPTS = 8  # of one command after an event: more would be help by hand


class NotHereError(Exception):
    """The event cannot happen on this machine, or what it is about is not there."""


@dataclass(frozen=True)
class Event:
    """One row of the table.

    Attributes:
        name: What happens.
        act: Lets it happen; None if `covered` is the test that does.
        heal: Takes it back before the command is given again.
        ends: Whether it ends the attempt; else the run goes on by itself.
        new: Whether it needs processes whose command lines can be read.
        writers: Whether the ranks save in the background.
        lost: The most intervals between two checkpoints that may be lost.
        fast: Whether it takes seconds, so that the minute of `make test` has it.
    """

    name: str
    act: Act | None = None
    heal: Act = lambda training, rng: None
    ends: bool = True
    new: bool = False
    writers: bool = False
    lost: int = 1
    fast: bool = False
    covered: str = ""


def _kill(*ranks: int, number: int = KILL, launcher: bool = False) -> Act:
    def act(training: Training, rng: random.Random) -> None:
        pids = training.pids()
        signal_to([pids[rank] for rank in ranks], number)
        signal_to([training.process.pid] * launcher, number)

    return act


def _kill_child(word: str) -> Act:
    def act(training: Training, rng: random.Random) -> None:
        def found() -> list[int]:
            return training.children(word) or [0] * (training.process.poll() is not None)

        if not all(pids := wait_for(found, f"a process with {word!r} in its command line")):
            raise NotHereError("the run had ended")
        signal_to([rng.choice(pids)], KILL)

    return act


def _all(training: Training, rng: random.Random) -> None:
    signal_to([training.process.pid, *descendants(training.process.pid)], KILL)


def _without_grace(training: Training, rng: random.Random) -> None:
    pids = training.pids()
    signal_to(pids, signal.SIGTERM)
    time.sleep(rng.uniform(0, 0.2))
    signal_to([training.process.pid, *pids], KILL)


def _stop(training: Training, rng: random.Random) -> None:
    signal_to([rng.choice(training.pids())], STOP)  # torchrun kills it when the other has given up


def _order(text: str, rank: int = 1) -> Act:
    return lambda training, rng: training.order(rank, text)


def _no_order(training: Training, rng: random.Random) -> None:
    for rank in range(RANKS):
        training.order(rank, "")


def _forget(training: Training, rng: random.Random) -> None:
    """Remove the last step of each rank, which made no update because its loss was NaN."""
    for rank in range(RANKS):
        path = training.folder / f"steps.{rank}"
        path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))


def _slow(training: Training, rng: random.Random) -> None:
    begin = training.at()[0]
    training.order(1, "slow 0.2")
    wait_for(lambda: training.at()[0] > begin + 4 or training.process.poll() is not None, "slow")
    training.order(1, "")


def _damage(way: str) -> Act:
    """Kill all, and damage a file of the newest checkpoint; one before it must be there."""

    def act(training: Training, rng: random.Random) -> None:
        wait_for(lambda: _saved(training) > 1 or training.process.poll() is not None, "two saves")
        _all(training, rng)
        wait_for(lambda: not any(map(alive, training.pids())), "the end of the ranks")
        newest, *older = checkpoints(training.run / "checkpoints")
        if not older:
            raise NotHereError("the run had ended before its second checkpoint")
        damage(newest, way, rng)

    return act


def _saved(training: Training) -> int:
    return len(checkpoints(training.run / "checkpoints"))


def _mounted(*options: str) -> Act:
    """Mount something over the folder of the checkpoints, so that the next save fails."""

    def act(training: Training, rng: random.Random) -> None:
        place = str(training.run / "checkpoints")
        for words in (options, ("-o", "remount,bind,ro")) if "--bind" in options else (options,):
            source = (place,) if "--bind" in words else ("none",) if "-t" in words else ()
            command = ["mount", *words, *source, place]
            if subprocess.run(command, check=False, capture_output=True).returncode:
                raise NotHereError("only root mounts")

    return act


def _unmount(training: Training, rng: random.Random) -> None:
    command = ["umount", "--lazy", str(training.run / "checkpoints")]
    while not subprocess.run(command, check=False, capture_output=True).returncode:
        pass  # there may be several mounts, one over the other


def _limit(training: Training, rng: random.Random) -> None:
    hard = resource.RLIM_INFINITY
    for pid in training.pids():
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (100_000, hard))


def _freezer(training: Training) -> Path:
    return Path("/sys/fs/cgroup/freezer") / f"hpctrain-{training.folder.name}-{os.getpid()}"


def _freeze(training: Training, rng: random.Random) -> None:
    """Put a rank into state D, as a hung NFS does: SIGKILL waits until it is thawed."""
    group = _freezer(training)
    try:
        group.mkdir()
        training.frozen = {training.pids()[1]}
        (group / "cgroup.procs").write_text(f"{training.pids()[1]}")
        (group / "freezer.state").write_text("FROZEN")
    except OSError as error:
        raise NotHereError(f"no freezer of cgroup v1 ({error.strerror})") from error
    others = [training.process.pid, training.pids()[0]]
    signal_to(others, KILL)  # what a watchdog does
    wait_for(lambda: not any(map(alive, others)), "the end of what is not frozen")


def _thaw(training: Training) -> None:
    group = _freezer(training)
    if group.is_dir():
        signal_to([*training.frozen], KILL)
        (group / "freezer.state").write_text("THAWED")
        wait_for(lambda: not (group / "cgroup.procs").read_text(), "the thawed rank")
        group.rmdir()


KILLS = (
    Event("SIGKILL of rank 0", _kill(0)),
    Event("SIGKILL of rank 1", _kill(1), fast=True),
    Event("SIGKILL of all", _all),
    Event("SIGKILL of the launcher", _kill(launcher=True)),
)
EVENTS = (
    *KILLS,
    Event("SIGKILL of the observer", _kill_child(OBSERVER), ends=False, new=True),
    Event("SIGKILL of the writer", _kill_child(WRITER), ends=False, new=True, writers=True),
    # The save that was under way is lost, too.
    Event("SIGKILL of all, with writers", _all, writers=True, lost=2),
    Event("SIGTERM of all, with writers", _kill(0, 1, number=signal.SIGTERM), writers=True, lost=0),
    Event("SIGKILL of the uploader", covered="tests/tracking/test_uploader.py"),
    Event("SIGSTOP of a rank", _stop),
    Event("state D (frozen cgroup)", _freeze),
    Event("preemption with grace", _kill(0, 1, number=signal.SIGTERM), lost=0),
    Event("preemption without grace", _without_grace),
    Event("time limit (SIGUSR2)", _kill(0, 1, number=signal.SIGUSR2), lost=0),
    Event("slow rank", _slow, ends=False),
    Event("NaN once", _order("nan"), _forget),
    Event("clock an hour back", _order("clock -3600", 0), _no_order, ends=False),
    Event("clock a day on", _order("clock 86400", 0), _no_order, ends=False),
    Event("ENOSPC at a save", _mounted("-t", "tmpfs", "-o", "size=64k"), _unmount, lost=2),
    Event("read-only folder at a save", _mounted("--bind"), _unmount, lost=2),
    Event("a file limit (EFBIG) at a save", _limit, lost=2),
    Event("checkpoint truncated", _damage("truncated"), lost=2, fast=True),
    Event("checkpoint flipped", _damage("flipped"), lost=2),
    Event("checkpoint swapped", _damage("swapped"), lost=2),
    Event("checkpoint file missing", _damage("missing"), lost=2),
    Event("ENOSPC elsewhere", covered="tests/job/test_storage_failures.py"),
    Event("EIO, EDQUOT", covered="nothing: no device or quota of this machine gives them to root"),
    Event("every bit of a manifest", covered="tests/checkpoint/test_checkpointer.py"),
    Event("SIGKILL in a data worker", covered="tests/data/test_workers.py"),
    Event("a rank that hangs, in a job", covered="tests/job/test_cluster.py"),
    Event("SIGKILL of MLflow's server", covered="tests/tracking/test_tracking_server.py"),
)


@dataclass
class Row:
    """What has come of an event, over all its times."""

    times: int = 0
    recoveries: list[float] = field(default_factory=list)  # seconds to the first step after it
    lost: list[int] = field(default_factory=list)  # steps
    wrong: list[str] = field(default_factory=list)
    by_hand: list[str] = field(default_factory=list)
    how: Counter[str] = field(default_factory=Counter)  # it went on: a restart, a requeue ...
    not_here: str = ""

    def line(self, name: str) -> str:
        """Return the row under HEAD."""
        times, lost = sorted(self.recoveries), self.lost or [0]
        shown = [times[len(times) // 2], times[int(0.9 * len(times))], times[-1]] if times else []
        seconds = "".join(f"{x:{w}.1f}" for x, w in zip(shown, (8, 7, 7), strict=False))
        how = ", ".join(f"{count} x {what}" for what, count in self.how.items())
        line = (
            f"{name:34}{self.times:6}{seconds or '-':>22}  {statistics.mean(lost):7.1f}"
            f"{max(lost):5}{len(self.wrong):7}{len(self.by_hand):8}  {self.not_here or how}"
        )
        return line.rstrip()

    @property
    def faults(self) -> list[str]:
        """Everything that was wrong, or that needed a hand."""
        wrong = [f"WRONG: {each}" for each in self.wrong]
        return wrong + [f"BY HAND: {each}" for each in self.by_hand]


HEAD = (
    f"{'':40}{'recovery in s':>22}  {'steps lost':>12}\n"
    f"{'event':34}{'times':>6}{'median':>8}{'90%':>7}{'most':>7}  {'mean':>7}{'most':>5}"
    f"{'wrong':>7}{'by hand':>8}"
)


class Suite:
    """Disturbs trainings, and keeps the table; the undisturbed one is made once."""

    def __init__(self, folder: Path, digits: Path, device: str = "cpu") -> None:
        self.folder, self.rows = folder, defaultdict[str, Row](Row)
        self.digits, self._count = digits, 0
        self._on_gpu = device == "cuda"  # both ranks share one
        self._more = (f"parallel.device={device}", "parallel.backend=gloo") * self._on_gpu
        self.undisturbed = Training(folder / "undisturbed", digits, self._more, self._on_gpu)
        self.undisturbed.start()
        if self.undisturbed.wait():
            raise AssertionError((self.undisturbed.folder / "out").read_text())
        self.steps = self.undisturbed.at()[1]

    def disturb(self, events: Sequence[Event], seed: int, name: str = "") -> Training:
        """Let the events happen in one training, one after the other, each at a random step.

        They are counted in their own rows, or all of them in the row `name`.
        """
        rows = [self.rows[name or event.name] for event in events]
        rng, self._count = random.Random(seed), self._count + 1
        training = Training(
            self.folder / f"{self._count}-{seed}",
            self.digits,
            self._more,
            # A fork may not use CUDA where its parent has asked for GPUs.
            new=self._on_gpu or any(event.new for event in events),
            writers=any(event.writers for event in events),
        )
        # At least some steps lie between two events, also if the last one is near the end.
        at = sorted(rng.sample(range(3, self.steps - 1), len(events)))
        told = []
        training.start()
        try:
            for event, step, row in zip(events, at, rows, strict=True):
                told.append(f"{event.name} at step {step}")
                self._happen(event, step, training, rng, row)
            self._go_on(training, rows[-1], ", ".join(told))
        finally:
            if training.process.poll() is None:
                _all(training, rng)
            _thaw(training)
            _unmount(training, rng)
        row = rows[-1]
        if training.ends and training.ends[-1] == 0:
            where = f"seed {seed} ({', '.join(told)})"
            row.wrong += [f"{where}: {each}" for each in differences(training, self.undisturbed)]
        shutil.rmtree(training.folder, ignore_errors=not row.wrong)
        return training

    def _happen(
        self, event: Event, step: int, training: Training, rng: random.Random, row: Row
    ) -> None:
        def reached() -> bool:
            return training.at()[1] >= step or training.process.poll() is not None

        ended = False
        wait_for(reached, f"step {step}")
        time.sleep(rng.uniform(0, 0.05))  # somewhere in a step, a save or an evaluation
        before, last = training.at()
        if (code := training.process.poll()) is not None:
            if code:
                row.by_hand.append(f"it ended with {code} before {event.name}: {training.tail}")
            training.wait()
            return self._again(training)
        began = time.monotonic()
        try:
            assert event.act is not None
            event.act(training, rng)
            ended = event.ends
        except NotHereError as error:
            row.not_here = str(error)
        row.times += not row.not_here
        if not ended:
            return None
        code = training.wait()
        event.heal(training, rng)
        before, last = training.at()
        if code == 0:  # it had ended before the event could harm it
            return self._again(training)
        training.start()
        wait_for(lambda: training.at()[0] > before or training.process.poll() is not None, "a step")
        if training.at()[0] > before:
            first = training.steps(0)[before]
            row.recoveries.append(first.time - began)
            row.lost.append(last + 1 - first.number)
            if row.lost[-1] > event.lost * EVERY:
                row.wrong.append(f"{event.name} at step {step}: {row.lost[-1]} steps were lost")
        return None

    def _again(self, training: Training) -> None:
        """Give the command again after a run that has ended: it must say so, and change nothing."""
        training.start()

    def _go_on(self, training: Training, row: Row, told: str) -> None:
        """Let the run end, by the same command as often as an event may have ended it."""
        for _ in range(MOST_ATTEMPTS):
            if training.wait() == 0:
                return
            training.start()
        row.by_hand.append(f"{told}: it does not go on: {training.tail}")

    def table(self) -> Iterator[str]:
        """Yield the table, line by line, and then what was wrong."""
        yield HEAD
        yield from (row.line(name) for name, row in self.rows.items())
        yield from self.failed

    @property
    def failed(self) -> list[str]:
        """Everything that was wrong, or that needed a hand."""
        return [each for row in self.rows.values() for each in row.faults]
