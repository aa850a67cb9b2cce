"""What the scheduler knows of our jobs: one `squeue`, and one `sacct` for those that have left.

A job is ours by the path of its script (`squeue`'s Command), not by its number: that is known
before `sbatch` answers, so a submission that was cut off in the middle is found again, and a
number that a rebuilt cluster gives a second time deceives nobody.
"""

from __future__ import annotations

import logging
import os
import pwd
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass

from hpctrain.errors import LaunchError
from hpctrain.launch.environment import clean_environment

log = logging.getLogger(__name__)


class UnreachableError(LaunchError):
    """The controller does not answer: what it knows, or has taken, is not known here."""


Task = tuple[str, int]
"""The script's path and the number of the array task."""

_SQUEUE = "%K|%i|%T|%r|%N|%S|%o"  # the path comes last: it may hold a bar
_SACCT = ("JobID", "State", "ExitCode", "Reason", "NodeList")


@dataclass(frozen=True)
class Job:
    """One array task, as `squeue` shows it.

    Attributes:
        id: `ARRAYJOB_TASK`, what `scancel` and `scontrol` take.
        state: `PENDING`, `RUNNING`, `COMPLETING`, ...
        reason: why it waits, or "None".
        nodes: a Slurm hostlist; empty while it waits.
        start: when it began or is expected to, local ISO time or "N/A".
    """

    id: str
    state: str
    reason: str
    nodes: str
    start: str

    @property
    def is_ending(self) -> bool:
        """Whether it only cleans up: its program has ended."""
        return self.state == "COMPLETING"


@dataclass(frozen=True)
class Ended:
    """One array task that has left the queue, as `sacct` shows it.

    Attributes:
        state: `COMPLETED`, `FAILED`, `TIMEOUT`, `OUT_OF_MEMORY`, `NODE_FAIL`, `CANCELLED by UID`...
        exit_code: `CODE:SIGNAL`.
        reason: Slurm's, or "None".
        nodes: a Slurm hostlist.
    """

    state: str
    exit_code: str
    reason: str
    nodes: str


def me() -> str:
    """Who submits here. `su` may leave another name in LOGNAME, which getpass would believe."""
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:  # in a container
        return str(os.getuid())


def queued(users: Iterable[str]) -> dict[Task, Job]:
    """The jobs of these users that wait, run or end, by script and array task.

    One that is no array stands under `job ID`.

    Raises:
        UnreachableError: what the controller does not tell might be queued.
    """
    command = ("squeue", "--noheader", "--array", f"--user={','.join(users)}")
    answer = ask(*command, f"--format={_SQUEUE}")
    if answer is None:
        raise UnreachableError("squeue does not answer: is the controller up (scontrol ping)?")
    jobs = {}
    for line in answer.splitlines():
        task, *facts, script = line.split("|", 6)
        job = Job(*facts)
        # A job that is no array is not of a sweep of ours; a template may have started it.
        key = (script, int(task)) if task.isdigit() else (f"job {job.id}", 0)
        jobs[key] = job
    return jobs


def ended(arrays: Iterable[str]) -> dict[str, Ended] | None:
    """The tasks of these array jobs, by `ARRAYJOB_TASK`; None without an accounting database.

    Tasks that still wait are not listed one by one.
    """
    command = ("sacct", "--allocations", "--noheader", "--parsable2", f"--jobs={','.join(arrays)}")
    answer = ask(*command, f"--format={','.join(_SACCT)}", quiet=True)
    if answer is None:
        return None
    # The reason may hold a bar, nothing else can.
    tasks = {}
    for line in answer.splitlines():
        job, state, code, *reason, nodes = line.split("|")
        tasks[job] = Ended(state, code, "|".join(reason), nodes)
    return tasks


def ask(*command: str, quiet: bool = False) -> str | None:
    """What a command of the scheduler prints; None if it fails, with the reason logged."""
    try:
        # SQUEUE_STATES, SLURM_CLUSTERS and the like would hide jobs from us.
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
            env=clean_environment(),
        )
    except subprocess.CalledProcessError as error:
        said = (error.stderr or error.stdout).strip()
    except (OSError, subprocess.TimeoutExpired) as error:
        said = str(error)
    else:
        return done.stdout
    log.log(logging.DEBUG if quiet else logging.ERROR, "%s: %s", " ".join(command), said)
    return None
