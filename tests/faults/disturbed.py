"""A real training of two ranks that is disturbed, and the undisturbed one that it must equal.

    undisturbed ── samples and weights of each step, metrics ──┐
    disturbed ── event at a random moment ── the same command ─┴── equal, bit by bit

Nothing is mocked: the ranks are processes of torchrun with gloo, or of a job. A hook writes down
what each rank sees, in each step of each attempt: a digest of its batch and one of its parameters.
So a step that is made again must be the same again, whatever has ended the attempt before.
"""

import hashlib
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpctrain.base.names.step_names import step_of
from hpctrain.runs.checkpoints.manifest import checkpoints
from tests import forkserver
from tests.conftest import journal_metrics, only_run, run_json

RANKS, EVERY, LIMIT_S = 2, 8, 600.0
SIZE = (
    *(f"checkpoint.every_steps={EVERY}", "train.log_every=5", "train.eval_every=10"),
    # The patience decides the end, at about step 60, so what it has counted must not be lost.
    *("train.early_stopping.metric=val/loss", "train.early_stopping.patience=2"),
    *("train.early_stopping.min_delta=0.5", "train.max_steps=400", "model.dropout=0.1"),
    # What else a resumed run must go on with: an average of weights, the best checkpoint, stages
    # of the batch size, a frozen layer, a second evaluation, and a rate that follows a metric.
    *("train.ema=0.9", "checkpoint.best=val/accuracy", "scheduler=plateau"),
    "scheduler.plateau={metric: train/accuracy, patience: 1, factor: 0.5}",
    "optimizer.groups=[{match: '1.*', freeze: true}]",
    "train.batch_size_ramp=[{global_batch_size: 32, steps: 22}]",
    "data.val_sets=[{name: train, split: train}]",
    *("monitor.enabled=false", "tracking.upload=false", "parallel.timeout_s=60"),
    *("task._target_=disturbed_task.Task", "+hooks=[{_target_: disturbed_task.Recorder}]"),
)
TASK = """\
import hashlib, os, time
import torch
import torch.distributed as dist
from hpctrain.tasks import Classification
from hpctrain.addons.hooks import Hook

HERE = os.path.dirname(os.path.abspath(__file__))
real = time.time
calls = 0

def orders():
    try:
        with open(f"{HERE}/order.{dist.get_rank()}") as file:
            return file.read().split()
    except FileNotFoundError:
        return []

class Task(Classification):
    def __call__(self, model, batch):
        what, *numbers = orders() or ["nothing"]
        if model.training:
            time.sleep(float(numbers[0]) if what == "slow" else 0.01)
        if what == "spin" and model.training:
            torch.cuda._sleep(1 << 50)  # a kernel that does not end for days
        if what == "clock":
            time.time = lambda: real() + float(numbers[0])
        return super().__call__(model, batch)

    def sums(self, outputs, batch):
        if orders() == ["nan"]:
            os.remove(f"{HERE}/order.{dist.get_rank()}")
            outputs = outputs * float("nan")
        return super().sums(outputs, batch)

def digest(tensors):
    content = b"".join(t.detach().cpu().numpy().tobytes() for t in tensors)
    return hashlib.sha256(content).hexdigest()[:16]

class Recorder(Hook):
    def after_step(self, state):
        batch = digest(state.batch[name] for name in sorted(state.batch))
        seen = state.step, batch, digest(state.model.parameters()), os.getpid(), time.monotonic()
        with open(f"{HERE}/steps.{dist.get_rank()}", "a") as file:
            file.write(" ".join(map(str, seen)) + "\\n")
"""
# This module is read before the ranks decide whether writers are started.
SMALL = "\nfrom hpctrain.engine.checkpoint.saving import proof\nproof.SMALL_PART = 0\n"


def wait_for(ready: Callable[[], Any], what: str) -> Any:
    """Poll until the answer is true, for at most LIMIT_S, and return it."""
    end = time.monotonic() + LIMIT_S
    while not (answer := ready()):
        assert time.monotonic() < end, f"waited {LIMIT_S:g} s in vain: {what}"
        time.sleep(0.005)
    return answer


@dataclass(frozen=True)
class Step:
    """What a rank has seen of a step."""

    number: int
    batch: str
    weights: str
    pid: int
    time: float  # monotonic


@dataclass
class Training:
    """A training in a folder of its own, by `torchrun`; `start` may be called again and again.

    With `new` its processes are new Pythons, whose command lines `/proc` shows, and no forks. With
    `writers` the ranks save in the background, for which their state is too small otherwise.
    """

    folder: Path
    digits: Path
    more: tuple[str, ...] = ()
    new: bool = False
    writers: bool = False
    process: Any = None
    ends: list[int] = field(default_factory=list)  # exit codes
    frozen: set[int] = field(default_factory=set)  # processes that cannot end

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "disturbed_task.py").write_text(TASK + SMALL * self.writers)

    def start(self) -> None:
        """Start the command, the same each time."""
        words = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
        where = [f"data.path={self.digits}", f"output_dir={self.folder}/runs"]
        command = [*words, "-m", "hpctrain", "experiment=digits", *where, *SIZE, *self.more]
        with (self.folder / "out").open("ab") as out:
            self.process = (subprocess if self.new else forkserver).Popen(
                [sys.executable, *command],
                cwd=self.folder,
                env=os.environ | {"PYTHONPATH": str(self.folder), "PATH": "/usr/bin:/bin"},
                stdout=out,
                stderr=out,
            )

    def wait(self) -> int:
        """Wait until the command and all ranks have ended; return the exit code."""
        wait_for(lambda: self.process.poll() is not None, "the end")
        self.ends.append(self.process.returncode)
        for pid in {*self.pids()} - self.frozen:
            wait_for(lambda pid=pid: not alive(pid), f"the end of rank {pid}")
        return self.ends[-1]

    def steps(self, rank: int) -> list[Step]:
        """Return what a rank has seen, of all attempts."""
        with suppress(FileNotFoundError):
            lines = (self.folder / f"steps.{rank}").read_text().splitlines(keepends=True)
            whole = [line.split() for line in lines if line.endswith("\n")]
            return [Step(int(n), b, w, int(pid), float(at)) for n, b, w, pid, at in whole]
        return []

    def pids(self) -> list[int]:
        """Return the processes of the ranks that have made the last steps, by rank."""
        return [self.steps(rank)[-1].pid for rank in range(RANKS) if self.steps(rank)]

    def at(self) -> tuple[int, int]:
        """Return how many steps rank 0 has made in all attempts, and the last one's number."""
        seen = self.steps(0)
        return len(seen), seen[-1].number if seen else 0

    @property
    def run(self) -> Path:
        """The run directory."""
        return only_run(self.folder)

    def children(self, word: str) -> list[int]:
        """Return the living processes below the command whose command line has the word."""
        return [pid for pid in descendants(self.process.pid) if word in command_line(pid)]

    @property
    def tail(self) -> str:
        """The last lines of what the command has said."""
        return " | ".join((self.folder / "out").read_text().splitlines()[-30:])

    def order(self, rank: int, text: str) -> None:
        """Tell a rank what to do in its next steps; "" takes it back."""
        path = self.folder / f"order.{rank}"
        path.write_text(text) if text else path.unlink(missing_ok=True)


def alive(pid: int) -> bool:
    """Return whether a process runs, and is no zombie."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


def command_line(pid: int) -> str:
    """Return the words of a process."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    return ""


def descendants(pid: int) -> Iterator[int]:
    """Yield the processes below one."""
    for children in Path(f"/proc/{pid}/task").glob("*/children"):  # of each thread
        with suppress(OSError):
            for child in children.read_text().split():
                yield int(child)
                yield from descendants(int(child))


def signal_to(pids: list[int], number: int) -> None:
    """Send a signal to each process that is still there."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def weights(training: Training) -> dict[str, str]:
    """Return the digests of the files of the last checkpoint, and its step."""
    last = checkpoints(training.run / "checkpoints")[0]
    parts = {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in last.glob("*.distcp")}
    return parts | {"step": str(step_of(last))}


def differences(disturbed: Training, undisturbed: Training) -> list[str]:
    """Return in what a training differs from the undisturbed one; empty if in no bit."""
    found = []
    for rank in range(RANKS):
        known = {each.number: each for each in undisturbed.steps(rank)}
        for seen in disturbed.steps(rank):
            right = known.get(seen.number)
            if right is None or (seen.batch, seen.weights) != (right.batch, right.weights):
                what = "weights" if right and seen.batch == right.batch else "samples"
                found.append(f"rank {rank} has other {what} in step {seen.number}")
    one, two = run_json(disturbed.run), run_json(undisturbed.run)
    if (one["state"], one.get("reason")) != (two["state"], two.get("reason")):
        found.append(f"the end is {one['state']} ({one.get('reason')})")
    if one["best"] != two["best"]:
        found.append(f"the best is {one['best']}, not {two['best']}")
    mine, other = journal_metrics(disturbed.run), journal_metrics(undisturbed.run)
    found += [f"{key}: {mine.get(key)}, not {other.get(key)}" for key in mine | other
              if mine.get(key) != other.get(key)]  # fmt: skip
    if weights(disturbed) != weights(undisturbed):
        found.append("the files of the last checkpoint differ")
    results = [
        {name: value for name, value in each["result"].items() if not name.startswith("perf/")}
        for each in (one, two)
    ]
    if results[0] != results[1]:
        found.append(f"the result is {results[0]}")
    return found


def damage(checkpoint: Path, way: str, rng: random.Random) -> str:
    """Damage one file of a checkpoint; return its name."""
    files = sorted(path for path in checkpoint.iterdir())
    path = rng.choice(files)
    content = bytearray(path.read_bytes())
    if way == "truncated":
        path.write_bytes(content[: rng.randrange(len(content))])
    elif way == "flipped":
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        path.write_bytes(content)
    elif way == "swapped":
        other = rng.choice([each for each in files if each != path])
        path.write_bytes(other.read_bytes())
        other.write_bytes(content)
    else:
        path.unlink()
    return path.name
