"""A user's code may fork: its forks behave as if hpctrain were not there."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from hpctrain.base.files.lock import is_locked
from tests.conftest import Completed, runs

# Each fork is made in a step of a training. What came of it goes into a file of its own.
TASK = """\
import json, multiprocessing, os, signal, sys, threading, time
from hpctrain.tasks.classification import Classification

class Forking(Classification):
    step = 0

    def __call__(self, model, batch):
        self.step += 1
        getattr(self, f"step_{self.step}", lambda: None)()
        return super().__call__(model, batch)

    def note(self, *values):
        with open("notes", "a") as file:
            file.write(json.dumps([self.step, *values]) + "\\n")

    def step_2(self):  # a fork that is ended by a signal, as soon as it is there
        context = multiprocessing.get_context("fork")
        children = [context.Process(target=time.sleep, args=(600,)) for _ in range(3)]
        for child, number in zip(children, (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT)):
            child.start()
            os.kill(child.pid, number)
            child.join(60)
        self.note(*(child.exitcode for child in children))

    def step_3(self):  # one of another thread, with a handler of its own
        heard = signal.signal(signal.SIGHUP, lambda *_: os._exit(5))
        codes = []
        def fork():
            child = os.fork()
            if child == 0:
                os.kill(os.getpid(), signal.SIGHUP)
                time.sleep(60)
            codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        thread = threading.Thread(target=fork)
        thread.start()
        thread.join()
        signal.signal(signal.SIGHUP, heard)
        self.note(*codes)

    def step_4(self):  # one that outlives the run
        child = os.fork()
        if child == 0:
            os.setsid()
            for descriptor in (1, 2):
                os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)
            time.sleep(600)
            os._exit(0)
        self.note(child)
"""


@pytest.mark.usefixtures("store")
@pytest.mark.slow
def test_forks_of_a_users_task(train: Callable[..., Completed], tmp_path: Path) -> None:
    (tmp_path / "forking.py").write_text(TASK)
    train("task._target_=forking.Forking", "train.max_steps=6", new=True)
    (run,) = runs(tmp_path / "runs")
    notes = [json.loads(line) for line in (tmp_path / "notes").read_text().splitlines()]
    child = notes[-1][1]
    try:
        assert notes[:2] == [[2, -signal.SIGTERM, -signal.SIGUSR2, 1], [3, 5]]
        assert Path(f"/proc/{child}").exists()
        assert not is_locked(run / "lock")
        record = json.loads((run / "run.json").read_text())
        assert [attempt["state"] for attempt in record["attempts"]] == ["finished"]
        assert record["result"]["step"] == 6
    finally:
        os.kill(child, signal.SIGKILL)


# A fork that leaves the user's code by an exception, or is interrupted before it is there.
LEAVING = """\
import os, signal, sys
from hpctrain.tasks.classification import Classification

class Leaving(Classification):
    def __call__(self, model, batch):
        interrupted = lambda: os.kill(os.getpid(), signal.SIGINT)
        for end in (lambda: sys.exit(3), lambda: 1 / 0, interrupted):
            child = os.fork()
            if child == 0:
                end()
                raise KeyboardInterrupt
            print("fork:", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
        return super().__call__(model, batch)
"""


def test_a_fork_that_leaves_the_users_code_does_not_end_the_run(
    train: Callable[..., Completed], tmp_path: Path
) -> None:
    (tmp_path / "leaving.py").write_text(LEAVING)
    done = train("task._target_=leaving.Leaving", "train.max_steps=2", "tracking=off", new=True)
    told = [line for line in done.stdout.splitlines() if line.startswith("fork:")]
    assert told[:6] == ["fork: 3", "fork: 1", "fork: 1"] * 2
    (run,) = runs(tmp_path / "runs")
    record = json.loads((run / "run.json").read_text())
    assert [attempt["state"] for attempt in record["attempts"]] == ["finished"]
    assert "ZeroDivisionError" in done.stderr


# A private file and a module's own hook come before the first handler, as in a training.
LATE_SIGNAL = """\
import os, signal
from hpctrain.base.forks import handle, keep_private

keep_private(os.open("/dev/zero", os.O_RDONLY))
os.register_at_fork(after_in_child=lambda: os.kill(os.getpid(), signal.SIGINT))
handle(signal.SIGINT, lambda *_: os._exit(2))
try:
    child = os.fork()
except KeyboardInterrupt:
    os._exit(7)
if child == 0:
    os._exit(3)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_signal_during_a_fork_waits_for_the_hooks_of_all_modules() -> None:
    """What Python raises in a hook is dropped."""
    done = subprocess.run(
        [sys.executable, "-c", LATE_SIGNAL], capture_output=True, text=True, check=True
    )
    assert (done.stdout, done.stderr) == ("7\n", "")


# This process has no handler of ours; the fork has another file in the place of the private one.
PRIVATE = """\
import os
from hpctrain.base.forks import keep_private

reads, writes = os.pipe()
keep_private(writes)
if (child := os.fork()) == 0:
    os.write(writes, b"x")
    os._exit(0)
os.waitpid(child, 0)
os.close(writes)
print(os.read(reads, 1))
"""


def test_a_fork_loses_private_files_before_there_is_a_handler() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PRIVATE], capture_output=True, text=True, check=True
    )
    assert (done.stdout, done.stderr) == ("b''\n", "")
