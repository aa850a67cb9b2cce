"""The scheduler: `squeue` for jobs in the queue, `sacct` for jobs that have left it, `scancel`.

A job is recognized by the path of its script (the field Command of `squeue`), not by its job id.
The path is known before `sbatch` answers, so a job is found even if its submission was interrupted.
And a reinstalled cluster can use the same job ids again, but the paths are different.
"""

import logging
import math
import os
import pwd
import re
import subprocess
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import cached_property
from typing import Any

from hpctrain.base.errors import DistributedError, LaunchError
from hpctrain.base.forks import run
from hpctrain.base.names.run_record import RunRecord
from hpctrain.cluster.ranks.hostlist import expand_hostlist, listed
from hpctrain.cluster.slurm import patience
from hpctrain.cluster.slurm.job_environment import clean_environment

log = logging.getLogger(__name__)


class UnreachableError(LaunchError):
    """The controller does not answer. A job that was just submitted may be queued or not."""


NO_CONTROLLER = (
    "Slurm's controller does not answer: is it up (scontrol ping)? With "
    "hydra/launcher=submitit_local, the command that starts a run trains it on this machine"
)


Task = tuple[str, int]
"""The path of the script and the number of the array task."""

_SQUEUE = "%K|%i|%T|%r|%N|%S|%B|%o"  # the path comes last because it may contain a `|`
_JOB = (r"\d+|N/A", r"\d\S*", r"[A-Z_]+", *[r"[^|]*"] * 4, r".*")
# Lines of jobs, or their heading, in another form than the one that was asked for.
_OTHER_FORM = re.compile(r"(.*\|){4}|\s*JOBID\b|\s*\d\S*(\s+\S+){3,}\s+[A-Z]{1,2}\s+[\d:-]+\s")
# Messages of `scancel` about a job that has ended meanwhile. This is no error.
_GONE = ("Invalid job id specified", "already completing or completed")
_HELD = ("REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD")
_SACCT = ("JobID", "State", "ExitCode", "Reason", "NodeList")
_ENDED = (r"\d\S*", r"[A-Z_]+(?: .*|\+)?", r"\d+:\d+", r".*", r"[^|]*")  # the reason may have a `|`


@dataclass(frozen=True)
class Job:
    """One array task, as `squeue` shows it."""

    id: str  # `ARRAYJOB_TASK`, the form that `scancel` and `scontrol` accept
    state: str  # `PENDING`, `RUNNING`, `COMPLETING`, ...
    reason: str  # why it waits, or "None"
    nodes: str  # a Slurm hostlist; empty while it waits
    start: str  # when it has started or is expected to start: ISO local time, or "N/A"
    batch_host: str = ""  # the node of its batch script
    # The ids of the jobs of its chain that wait for its end.
    behind: tuple[str, ...] = field(default=(), kw_only=True)

    @property
    def is_ending(self) -> bool:
        """Whether its program has ended, and Slurm only cleans up."""
        return self.state == "COMPLETING"

    @property
    def needs(self) -> str:
        """What a person must do so that it goes on; "" if nothing."""
        # Slurm's words are "JobHeldUser", "JobHeldAdmin" and "launch failed requeued held".
        if self.state in _HELD or "held" in self.reason.lower():
            return f"held until somebody releases it: scontrol release {self.id}"
        if self.state in ("SUSPENDED", "STOPPED"):
            return f"suspended until the cluster or its administrator resumes it: {self.id}"
        if self.state == "RUNNING" and self._lost_script():  # a job of `sbatch --no-kill`
            return (
                f"its batch script was lost with {self.batch_host}, so it runs nothing and never "
                f"ends: scontrol requeue {self.id}"
            )
        return ""

    def _lost_script(self) -> bool:
        try:
            return bool(self.batch_host) and self.batch_host not in expand_hostlist(self.nodes)
        except DistributedError:
            return False


@dataclass(frozen=True)
class Ended:
    """One array task that has left the queue, as `sacct` shows it."""

    # `COMPLETED`, `FAILED`, `TIMEOUT`, `OUT_OF_MEMORY`, `NODE_FAIL`, `CANCELLED by UID`...
    state: str
    exit_code: str  # `CODE:SIGNAL`
    reason: str  # Slurm's reason, or "None"
    nodes: str  # a Slurm hostlist


def me() -> str:
    """Return the name of the user of this process."""
    # Not getpass.getuser(): it reads LOGNAME, where `su` may leave the name of another user.
    return user_name(os.getuid())


def user_name(uid: int) -> str:
    """Return the name of a user; the number if passwd has no entry, as in many containers."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _is_known(user: str) -> bool:
    try:
        return user.isdecimal() or bool(pwd.getpwnam(user))
    except (KeyError, ValueError):
        return False


class Queue(dict[Task, Job]):
    """The jobs in the queue by script and array task; `("job ID", 0)` is one that is no task.

    Of the jobs of a chain, which have one script, only the one in front has its key.
    """

    def task_of(self, record: RunRecord) -> Task | None:
        """Return the task of a run, from its run.json; it may be in the queue."""
        submission = record.submission
        task = (submission.script, submission.task) if submission else ("", -1)
        # A job of slurm/train.sbatch has no submission: its last attempt has the job id.
        if task not in self and record.state in ("running", "interrupted"):
            return self._by_id.get(record.attempt.job_id)
        return task

    @cached_property
    def _by_id(self) -> dict[str, Task]:
        return {job.id: task for task, job in self.items()}


def queue_of(records: Iterable[RunRecord]) -> Queue:
    """Return the queue of this user, and of all who have submitted these runs last."""
    submissions = (record.submission for record in records)
    return queued({me(), *(each.user for each in submissions if each)})


def queued(users: Iterable[str]) -> Queue:
    """Return the jobs of these users that are in the queue.

    If the controller does not answer, or `squeue` prints what was not asked for, it raises
    UnreachableError.
    """
    named = [*users]  # squeue refuses all if it does not know one
    known = [*filter(_is_known, named)] or named
    command = ("squeue", "--noheader", "--array", f"--user={','.join(known)}")
    answer = ask(*command, f"--format={_SQUEUE}")
    if answer is None:
        raise UnreachableError("squeue does not answer: is the controller up (scontrol ping)?")
    of_task: dict[Task, list[Job]] = defaultdict(list)
    for task, *facts, script in rows(answer, _JOB):
        job = Job(*facts)
        if job.state == "EXPEDITING":  # it waits, before all others (sbatch --requeue=expedite)
            job = replace(job, state="PENDING")
        # Sweeps are always arrays. Other jobs may be of slurm/train.sbatch.
        of_task[(script, int(task)) if task.isdigit() else (f"job {job.id}", 0)].append(job)
    jobs = Queue()
    for key, (front, *rest) in ((key, sorted(each, key=_place)) for key, each in of_task.items()):
        jobs[key] = replace(front, behind=tuple(job.id for job in rest))
        jobs |= {(f"job {job.id}", 0): job for job in rest}
    strange = [line for line in answer.splitlines() if _OTHER_FORM.match(line)]
    if strange and not jobs:  # it would look as if all jobs had ended
        raise UnreachableError(
            f"squeue prints {strange[0].strip()!r}, and was asked for --format={_SQUEUE}: does a "
            "script of this site stand in front of it (type -a squeue)?"
        )
    return jobs


def ended(arrays: Iterable[str]) -> dict[str, Ended] | None:
    """Return the tasks of these array jobs, by `ARRAYJOB_TASK`, as `sacct` lists them.

    `sacct` lists pending tasks of an array as one range, not one by one. It is None without an
    accounting database.
    """
    asked = ",".join(sorted(arrays))
    command = ("sacct", "--allocations", "--noheader", "--parsable2", f"--jobs={asked}")
    answer = ask(*command, f"--format={','.join(_SACCT)}", quiet=True)
    if answer is None:
        return None
    return {job: Ended(*facts) for job, *facts in rows(answer, _ENDED)}


def _place(job: Job) -> tuple[bool, bool, int]:
    """Return what sorts the jobs of a chain: that which runs, that which ends, those that wait."""
    return job.state == "PENDING", job.is_ending, int(job.id.partition("_")[0])


def cancel(ids: Iterable[str], *options: str) -> None:
    """Call `scancel` once for all job ids, if there are any; jobs that have ended are no error.

    Options are such as `--signal=USR2`. A refusal, or no answer of the controller, is a
    LaunchError.
    """
    if not (jobs := jobs_of(ids)):
        return
    done = call("scancel", *options, *jobs)
    said = [line for line in done.stderr.splitlines() if not any(word in line for word in _GONE)]
    # A wrapper of the site or a missing locale may have warned.
    if errors := [line for line in said if "error" in line.lower()]:
        raise LaunchError(f"scancel {' '.join(jobs)}: {'; '.join(errors)}")


def jobs_of(ids: Iterable[str]) -> list[str]:
    """Return the job ids as arguments of `scancel`, one per array: `123_[0-3,7]`."""
    arrays: dict[str, list[int]] = defaultdict(list)
    plain = []
    for job in ids:
        array, _, task = job.partition("_")
        if task:
            arrays[array].append(int(task))
        else:
            plain.append(job)
    # Runs may share a job.
    return plain + [f"{array}_[{listed(sorted({*each}), ',')}]" for array, each in arrays.items()]


def call(
    *command: str, timeout_s: float | None = 60, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run a command of the scheduler to its end; bytes that are no UTF-8 are replaced.

    One that the site refuses as one of too many is repeated later. It raises an OSError if there
    is no such command, and TimeoutExpired if it is late.
    """
    tries = 0
    while True:
        # Without SQUEUE_STATES, SLURM_CLUSTERS and the like, which would hide jobs.
        done: subprocess.CompletedProcess[str] = run(
            command,
            encoding="utf-8",
            errors="replace",
            timeout=timeout_s,
            env=clean_environment(),
            **options,
        )
        waits = patience.pauses(command, done.stderr) if done.returncode else ()
        if tries >= len(waits):
            return done
        patience.pause(waits[tries], f"{command[0]}: {' '.join(done.stderr.split())}")
        tries += 1


def rows(answer: str, fields: Sequence[str]) -> list[tuple[str, ...]]:
    """Return the rows of an answer, each with its fields, which `|` divides.

    The commands of some sites print a welcome before, warnings between or the balance of the
    account after the rows. Such lines are left out. Each of the fields is a regular expression
    without groups.
    """
    row = re.compile(r"\|".join(f"({field})" for field in fields))
    return [match.groups() for line in answer.splitlines() if (match := row.fullmatch(line))]


def since_epoch(text: str) -> float | None:
    """Return Slurm's local time in seconds since the epoch; None for a word such as `Unknown`."""
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        return None


def ask(*command: str, quiet: bool = False) -> str | None:
    """Run a command of the scheduler and return its output; None if it fails.

    The reason of a failure is logged as an error, or with `quiet` as a debug message. A watcher
    gets its last answer while that is young (`patience.watching`).
    """
    kept = patience.answers.get() or {}
    when, answer = kept.get(command, (-math.inf, ""))
    if time.monotonic() - when < patience.WATCH_S:
        return answer
    try:
        done = call(*command)
        done.check_returncode()
    except subprocess.CalledProcessError as error:
        message = " ".join((error.stderr or error.stdout).split()) or str(error)
    except (OSError, subprocess.TimeoutExpired) as error:
        message = str(error)
    else:
        if (answers := patience.answers.get()) is not None:
            answers[command] = time.monotonic(), done.stdout
        return done.stdout
    log.log(logging.DEBUG if quiet else logging.ERROR, "%s: %s", " ".join(command), message)
    return None
