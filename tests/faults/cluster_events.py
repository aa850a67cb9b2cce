"""The events of the fault suite that need Slurm: the development cluster, and a job of two nodes.

The job goes on by itself: by a restart in its allocation, or by its requeue, whose two minutes
`dev-cluster hurry` takes away. A job that has to be submitted again was restarted by hand.
"""

import os
import random
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from hpctrain.commands.facts import gather
from tests import cluster
from tests.conftest import run_json, run_module
from tests.faults.disturbed import (
    EVERY,
    SIZE,
    Training,
    command_line,
    descendants,
    differences,
    signal_to,
    wait_for,
)
from tests.faults.suite import OBSERVER, WRITER, NotHereError, Suite

sys.path.insert(0, str(cluster.TOOL.parent))
from dev_cluster.cluster import Cluster

MOST_SUBMISSIONS = 3
FREEZER = Path("/sys/fs/cgroup/freezer")


@dataclass
class Job(Training):
    """The same training as a job on two nodes; `start` submits it."""

    id: str = ""

    def start(self) -> None:
        """Submit the job, by the same command each time."""
        where = [f"data.path={self.digits}", f"output_dir={self.folder}/runs"]
        shape = ["launch.nodes=2", "site.partition=preemptible", "parallel=ddp"]
        setup = f"site.setup=['export PATH={self.folder}/bin:$PATH']"
        given = ["-m", "experiment=digits", *where, *SIZE, *shape, setup, *self.more]
        run_module("hpctrain", *given, cwd=self.folder, PYTHONPATH=str(self.folder))
        first = cluster.job_ids(self.folder / "runs")[0].split("_")[0].split()[0]  # of a chain
        self.id = f"{first}_0"

    @property
    def state(self) -> str:
        """What Slurm says of the job, or of the job of its chain that follows it."""
        while (state := cluster.job_state(self.id)) in cluster.ENDED - {"COMPLETED"}:
            chain = gather([self.run])[0].chain
            number = chain.index(self.id.partition("_")[0]) + 1 if chain else 0
            if number == len(chain):
                break
            self.id = f"{chain[number]}_0"
        return state

    @property
    def how(self) -> Counter[str]:
        """How its attempts have followed one another."""
        attempts = run_json(self.run)["attempts"]
        keys = [(each["job_id"], each["restart_count"], each["step_id"]) for each in attempts]
        return Counter(
            "next job" if one[0] != two[0] else "requeue" if one[1] != two[1] else "same job"
            for one, two in pairwise(keys)
        )

    def processes(self, program: str, word: str = "") -> list[int]:
        """Return the processes of a program, or of all, on the head and the nodes of the job."""
        here = {"head", *self.nodes}
        found = Cluster(os.environ[cluster.SETTING]).processes()
        own = [pid for host, comm, pid in found if program in ("", comm) and host in here]
        return [pid for pid in own if word in command_line(pid)]

    @property
    def nodes(self) -> list[str]:
        """The nodes of the job, that of the batch script first."""
        hosts = cluster.slurm("squeue", "-h", "-j", self.id, "-o", "%N")
        return cluster.slurm("scontrol", "show", "hostnames", hosts).split()


JobAct = Callable[[Job, random.Random], None]


def _kill_rank(rank: int, number: int = signal.SIGKILL) -> JobAct:
    return lambda job, rng: signal_to([job.pids()[rank]], number)


def _kill(program: str, word: str = "") -> JobAct:
    def act(job: Job, rng: random.Random) -> None:
        number = cluster.slurm("squeue", "-h", "-j", job.id, "-o", "%A")
        found = job.processes(program, word.format(job=number))
        assert found, f"there is no {program} {word}"
        signal_to([rng.choice(sorted(found))], signal.SIGKILL)

    return act


def _kill_observer(job: Job, rng: random.Random) -> None:
    """Kill that of the second node, which the first one would take for silent."""
    below = descendants(job.pids()[1])
    signal_to([pid for pid in below if OBSERVER in command_line(pid)], signal.SIGKILL)


def _kill_srun(job: Job, rng: random.Random) -> None:
    """Kill the srun that waits for the ranks; the other one is its helper, and its child."""
    signal_to([min(job.processes("srun", job.folder.name))], signal.SIGKILL)


def _tool(*words: str) -> JobAct:
    def act(job: Job, rng: random.Random) -> None:
        done = cluster.tool(*(word.format(job=job.id) for word in words))
        assert done.returncode == 0, done.stderr

    return act


def _slurm(*words: str) -> JobAct:
    return lambda job, rng: print(cluster.slurm(*(word.format(job=job.id) for word in words)))


def _cut(job: Job, rng: random.Random) -> None:
    """Cut the second node, which is not that of the batch script."""
    assert cluster.tool("cut", job.nodes[1]).returncode == 0


def _no_scontrol(job: Job, rng: random.Random) -> None:
    """Kill a rank while `scontrol` fails for the job, as with a busy controller, for 20 s."""
    (job.folder / "bin").mkdir()
    real, end = shutil.which("scontrol"), f"{time.time() + 20:.0f}"
    planted = job.folder / "bin" / "scontrol"
    busy = "echo 'slurm_update error: Unable to contact slurm controller' >&2; exit 1"
    text = f'#!/bin/sh\n[ "$(date +%s)" -lt {end} ] && {{ {busy}; }}\nexec {real} "$@"\n'
    planted.write_text(text)
    planted.chmod(0o755)
    signal_to([job.pids()[1]], signal.SIGKILL)


def _freeze(job: Job, rng: random.Random) -> None:
    """Put rank 1 into state D, as a hung NFS does: SIGKILL waits until it is thawed."""
    group = FREEZER / f"hpctrain-{job.folder.name}-{os.getpid()}"
    try:
        group.mkdir()
        (group / "cgroup.procs").write_text(f"{job.pids()[1]}")
        (group / "freezer.state").write_text("FROZEN")
    except OSError as error:
        raise NotHereError(f"no freezer of cgroup v1 ({error.strerror})") from error


def _thaw(job: Job, rng: random.Random) -> None:
    group = FREEZER / f"hpctrain-{job.folder.name}-{os.getpid()}"
    with suppress(FileNotFoundError):
        (group / "freezer.state").write_text("THAWED")
        wait_for(lambda: not (group / "cgroup.procs").read_text(), "the thawed rank")
        group.rmdir()


def _preempts(mode: str, grace_s: int) -> JobAct:
    """Set what becomes of jobs that are preempted."""
    where = ("scontrol", "update", "PartitionName=preemptible")
    return lambda job, rng: print(
        cluster.slurm(*where, f"PreemptMode={mode}", f"GraceTime={grace_s}"), end=""
    )


def _heal(job: Job, rng: random.Random) -> None:
    cluster.heal()


def _nothing(job: Job, rng: random.Random) -> None:
    pass


@dataclass(frozen=True)
class JobEvent:
    """One row of the table.

    Attributes:
        name: What happens.
        act: Lets it happen.
        heal: Takes it back, again and again once Slurm has noticed, and at the end.
        before: Prepares the cluster.
        more: Overrides of the job.
        writers: Whether the ranks save in the background.
        only_at_end: Whether `heal` waits for the end of the run, which goes on without it.
        runs_on: Whether no attempt may end.
        slow_s: The ranks take 2 s a step for so long, until somebody must have noticed.
    """

    name: str
    act: JobAct
    heal: JobAct = _nothing
    before: JobAct = _nothing
    more: tuple[str, ...] = ()
    writers: bool = False
    only_at_end: bool = False
    runs_on: bool = False
    slow_s: float = 0.0
    covered: str = ""


_PREEMPT = _tool("preempt", "{job}")
_SPARE = ("launch.spares=1",)
_AS_BEFORE = _preempts("REQUEUE", 10)
ON_CLUSTER = (
    JobEvent("job: SIGKILL of rank 0", _kill_rank(0)),
    JobEvent("job: SIGKILL of rank 1", _kill_rank(1)),
    JobEvent("job: SIGSTOP of rank 1", _kill_rank(1, signal.SIGSTOP)),
    JobEvent("job: state D, with a spare", _freeze, _thaw, more=_SPARE, only_at_end=True),
    # The requeue waits until Slurm is rid of the task: here until it is thawed, after a minute.
    JobEvent("job: state D", _freeze, _thaw),
    JobEvent(
        "job: SIGKILL of an observer",
        _kill_observer,
        more=("hang.floor_s=5",),
        runs_on=True,
        slow_s=20,
    ),
    JobEvent("job: SIGKILL of a writer", _kill("", WRITER), writers=True, runs_on=True),
    JobEvent("job: SIGKILL of srun", _kill_srun),
    # After two minutes srun sees that it cannot reach the node, and ends the step.
    JobEvent("job: SIGKILL of slurmstepd", _kill("slurmstepd", "[{job}.0]"), slow_s=150),
    JobEvent("job: SIGKILL of a slurmd", _kill("slurmd"), _heal, slow_s=45),
    JobEvent("job: SIGKILL of slurmctld", _kill("slurmctld"), _heal, slow_s=20),
    JobEvent("job: SIGKILL of the batch script", _kill("slurm_script")),
    JobEvent("job: preemption with grace", _PREEMPT),
    JobEvent("job: preemption without grace", _PREEMPT, _AS_BEFORE, _preempts("REQUEUE", 0)),
    JobEvent("job: preemption, chain of jobs", _PREEMPT, _AS_BEFORE, _preempts("CANCEL", 0)),
    JobEvent(
        "job: preemption, cancelled at once",
        _PREEMPT,
        _AS_BEFORE,
        _preempts("CANCEL", 0),
        more=("launch.chain=1",),
    ),
    JobEvent("job: time limit (SIGUSR2)", _slurm("scancel", "--signal=USR2", "{job}")),
    JobEvent("job: requeue by the administrator", _slurm("scontrol", "requeue", "{job}")),
    JobEvent("job: a node is cut", _cut, _heal),
    JobEvent("job: a node is cut, with a spare", _cut, _heal, more=_SPARE, only_at_end=True),
    JobEvent("job: scontrol fails for 20 s", _no_scontrol),
)


def disturb(suite: Suite, event: JobEvent, seed: int) -> None:
    """Let the event happen to a job at a random step, and let the job go on."""
    rng, row = random.Random(seed), suite.rows[event.name]
    folder = suite.folder / f"job-{seed}"
    job = Job(folder, suite.digits, event.more, writers=event.writers)
    for rank in range(2):
        job.order(rank, "slow 0.1")
    try:
        event.before(job, rng)
        job.start()
        step = rng.randrange(12, suite.steps - 30)
        wait_for(lambda: job.at()[1] >= step, f"step {step} of job {job.id}")
        time.sleep(rng.uniform(0, 0.1))
        where = f"seed {seed}, {event.name} at step {step}"
        for rank in range(2):
            job.order(rank, "slow 2")  # some events take seconds
        pid, began = job.pids()[0], time.monotonic()
        event.act(job, rng)
        row.times += 1
        slow_until = time.monotonic() + event.slow_s
        while time.monotonic() < slow_until and job.pids()[0] == pid:
            time.sleep(0.5)
        for rank in range(2):
            job.order(rank, "")
        _wait(job, event, where, suite, rng)
    except NotHereError as error:
        row.not_here = str(error)
        cluster.tool("exec", "--", "scancel", job.id)
        return
    finally:
        event.heal(job, rng)
    seen = job.steps(0)
    if after := [each for each in seen if each.pid != pid]:
        row.recoveries.append(after[0].time - began)
        row.lost.append(max(e.number for e in seen if e.pid == pid) + 1 - after[0].number)
        if row.lost[-1] > EVERY * (1 + event.writers):
            row.wrong.append(f"{where}: {row.lost[-1]} steps were lost")
        if event.runs_on:
            row.wrong.append(f"{where}: {run_json(job.run)['attempts'][0]['reason']}")
    row.how += job.how or Counter({"ran on": 1})
    found = differences(job, suite.undisturbed)
    row.wrong += [f"{where}: {each}" for each in found]
    if not found:
        shutil.rmtree(job.folder)


def _wait(job: Job, event: JobEvent, where: str, suite: Suite, rng: random.Random) -> None:
    """Wait until the job has ended; one that has to be submitted again was restarted by hand."""
    row, began = suite.rows[event.name], time.monotonic()
    submissions, healed = 1, began + 60
    while (state := job.state) != "COMPLETED":
        if time.monotonic() > healed and not event.only_at_end:  # Slurm has noticed by now
            event.heal(job, rng)
            healed = time.monotonic() + 60
        if state == "PENDING":
            cluster.tool("hurry", job.id)
        elif state in cluster.ENDED:
            row.by_hand.append(f"{where}: the job is {state}")
            if submissions == MOST_SUBMISSIONS:
                return
            job.start()
            submissions += 1
        # A task that cannot be killed holds its job until it is thawed.
        if event.only_at_end and run_json(job.run)["state"] == "finished":
            event.heal(job, rng)
        assert time.monotonic() - began < 900, f"{event.name}: job {job.id} is {state}"
        time.sleep(0.5)
