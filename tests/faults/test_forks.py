"""A user's code may fork: its forks behave as if hpctrain were not there."""

import json
import os
import signal
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
