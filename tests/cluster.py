"""The development cluster for tests: hpctrain/testing/fixtures.py starts one for each test process.

It does so when a test first asks for `slurm_cluster`, or for `empty_queue`. To keep a cluster for
many runs of pytest, start it by hand: a pytest without `-n` uses the cluster that SLURM_CONF names
(`eval "$(slurm/dev-cluster env)"`).
"""

import atexit
import functools
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

import pytest

from hpctrain.base.names.step_names import of_steps, step_of
from hpctrain.testing.command import TOOL as TOOL
from hpctrain.testing.fixtures import SETTING as SETTING
from hpctrain.testing.fixtures import claim_number
from hpctrain.testing.fixtures import tool as tool
from tests.conftest import run_json, runs

T = TypeVar("T")


@functools.cache
def number() -> int:
    """Return a number for a second cluster and subnet of this process, as long as it runs."""
    found, claim = claim_number()
    atexit.register(claim.close)
    return found


def slurm(*command: str, env: Mapping[str, str] | None = None, timeout: float = 120) -> str:
    """Run a command and return its output; an AssertionError shows the output of a failed one."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=env)
    said = f"{done.stdout}{done.stderr}"
    assert done.returncode == 0, f"{' '.join(command)} ended with {done.returncode}: {said}"
    return done.stdout.strip()


def heal() -> None:
    """Make every node usable, also a node that did not answer slurmctld on a busy machine."""
    done = tool("up")
    assert done.returncode == 0, f"dev-cluster up: {done.stdout}{done.stderr}"
    if "healed" in done.stdout:
        print(done.stdout)  # why a node was down; pytest shows it where the test fails


def sbatch(script: str, *options: str, env: Mapping[str, str] | None = None) -> str:
    """Submit the text of a shell script; return the job id."""
    return slurm("sbatch", "--parsable", *options, "--wrap", script, env=env)


def job_state(job: str) -> str:
    """Return the state of a running or ended job: `PENDING`, `RUNNING`, `COMPLETED`, ...

    The state is empty when Slurm does not know the job.
    """
    queued = subprocess.run(
        ["squeue", "--noheader", "--job", job, "--format=%T"], capture_output=True, text=True
    ).stdout.split()
    if queued:
        return queued[0]
    # `CANCELLED by 0` is one state.
    accounting = ("sacct", "-X", "--noheader", "--parsable2", "--jobs", job, "--format=State")
    # A job that has lost a node has a line of its time with this node, too: RESIZING.
    lines = slurm(*accounting).splitlines()
    states = [line.split()[0] for line in lines if line != "RESIZING"]
    return states[0] if states else ""


def wait_for(predicate: Callable[[], T], timeout: float, what: str) -> T:
    """Call `predicate` until its answer is true and return it; fail the test after `timeout` s.

    The pauses between the calls grow from 0.2 s to 1 s, because most calls start a command.
    """
    begin = time.monotonic()
    while not (answer := predicate()):
        waited = time.monotonic() - begin
        assert waited < timeout, f"waited {timeout:g} s in vain: {what}"
        time.sleep(min(max(waited / 5, 0.2), 1.0))
    return answer


ENDED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED"}


def queue() -> list[str]:
    """Return the ids of this user's jobs, one for each array task."""
    return slurm("squeue", "--noheader", "--array", "--me", "--format=%i").split()


def wait_for_end(jobs: list[str], timeout: float = 240) -> dict[str, str]:
    """Wait until all jobs have ended, for at most `timeout` s; return job id to final state."""

    waiting = ["squeue", "--noheader", f"--job={','.join(jobs)}", "--format=%i"]

    def ended() -> dict[str, str] | None:
        if len(jobs) > 1 and subprocess.run(waiting, capture_output=True).stdout.strip():
            return None
        states = {job: job_state(job) for job in jobs}
        return states if set(states.values()) <= ENDED else None

    return wait_for(ended, timeout, f"the end of {jobs}")


def job_ids(folder: Path) -> list[str]:
    """Return the array tasks of all runs under `folder`, which is an `output_dir`."""
    return [job_id(run) for run in runs(folder)]


def job_id(run: Path) -> str:
    """Return the array task that was given the run, such as `12_0`."""
    asked = run_json(run)["submission"]
    array = Path(asked["script"]).with_name("job_id").read_text().strip()
    return f"{array}_{asked['task']}"


def wait_for_step(run: Path, step: int) -> None:
    """Wait for a checkpoint of at least `step`, for at most 180 s."""
    wait_for(
        lambda: any(step_of(p) >= step for p in of_steps(run / "checkpoints")),
        180,
        f"a checkpoint of step {step}",
    )


PACED = """\
import os, time
from hpctrain.tasks import Classification

class Paced(Classification):
    def __call__(self, model, batch):
        if os.path.exists(os.path.dirname(__file__) + "/slow"):
            time.sleep(0.05)
        if os.path.exists(os.path.dirname(__file__) + "/fail"):
            raise RuntimeError("as the test asked")
        return super().__call__(model, batch)
"""


class Paced:
    """A task whose steps sleep 0.05 s until `go` is called.

    It lets a test reach a run before the run ends, however short the run and however busy the
    machine. The sleeping leaves the processors to other processes.

    Attributes:
        task: The override that chooses this task.
    """

    task = "task._target_=paced_task.Paced"

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        folder.mkdir()
        (folder / "paced_task.py").write_text(PACED)
        self._slow, self._fail = folder / "slow", folder / "fail"
        self._slow.touch()
        monkeypatch.setenv("PYTHONPATH", str(folder), prepend=":")

    def go(self) -> None:
        """Let all further steps run without sleeping."""
        self._slow.unlink()

    def fail(self, on: bool = True) -> None:
        """Let all further steps raise an exception, or no longer."""
        if on:
            self._fail.touch()
        else:
            self._fail.unlink()
