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
from collections.abc import Callable
from dataclasses import dataclass

from tests import cluster
from tests.conftest import run_module
from tests.faults.disturbed import (
    EVERY,
    SIZE,
    Training,
    command_line,
    differences,
    signal_to,
    wait_for,
)
from tests.faults.suite import Event, Suite

sys.path.insert(0, str(cluster.TOOL.parent))
from dev_cluster.cluster import Cluster

MOST_SUBMISSIONS = 3


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
        (self.id,) = cluster.job_ids(self.folder / "runs")

    @property
    def state(self) -> str:
        """What Slurm says of the job."""
        return cluster.job_state(self.id)

    def processes(self, program: str, word: str = "") -> list[int]:
        """Return the processes of a program on the head and the nodes of the job."""
        here = {"head", *self.nodes}
        found = Cluster(os.environ[cluster.SETTING]).processes()
        own = [pid for host, comm, pid in found if comm == program and host in here]
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


def _heal(job: Job, rng: random.Random) -> None:
    cluster.heal()


def _event(name: str, act: JobAct | None = None, heal: JobAct = lambda job, rng: None,
           covered: str = "") -> Event:  # fmt: skip
    return Event(name, act, heal, covered=covered)  # type: ignore[arg-type]


ON_CLUSTER = (
    _event("job: SIGKILL of rank 0", _kill_rank(0)),
    _event("job: SIGKILL of rank 1", _kill_rank(1)),
    _event("job: SIGSTOP of rank 1", _kill_rank(1, signal.SIGSTOP)),
    _event("job: SIGKILL of srun", _kill("srun")),
    _event("job: SIGKILL of slurmstepd", _kill("slurmstepd", "[{job}.0]")),
    _event("job: SIGKILL of a slurmd", _kill("slurmd"), _heal),
    _event("job: SIGKILL of slurmctld", _kill("slurmctld"), _heal),
    _event("job: SIGKILL of the batch script", _kill("slurm_script")),
    _event("job: preemption with grace", _tool("preempt", "{job}")),
    _event("job: time limit (SIGUSR2)", _slurm("scancel", "--signal=USR2", "{job}")),
    _event("job: requeue by the administrator", _slurm("scontrol", "requeue", "{job}")),
    _event("job: a node is cut", _cut, _heal),
    _event("job: scontrol fails for 20 s", _no_scontrol),
    _event("job: a node is cut, with a spare", covered="nothing yet: launch.spares"),
    _event("job: state D, watchdog", covered="nothing yet: the restart in the allocation"),
    _event("job: preemption without grace", covered="nothing yet: chains (launch.chain)"),
)


def disturb(suite: Suite, event: Event, seed: int) -> None:
    """Let the event happen to a job at a random step, and let the job go on."""
    rng, row = random.Random(seed), suite.rows[event.name]
    job = Job(suite.folder / f"job-{seed}", suite.digits)
    for rank in range(2):
        job.order(rank, "slow 0.1")
    job.start()
    step = rng.randrange(12, suite.steps - 30)
    wait_for(lambda: job.at()[1] >= step, f"step {step} of job {job.id}")
    time.sleep(rng.uniform(0, 0.1))
    pid, began = job.pids()[0], time.monotonic()
    assert event.act is not None
    event.act(job, rng)
    row.times += 1
    for rank in range(2):
        job.order(rank, "")
    submissions, healed = 1, time.monotonic() + 60
    while (state := job.state) != "COMPLETED":
        if time.monotonic() > healed:  # Slurm has noticed by now
            event.heal(job, rng)
            healed = time.monotonic() + 60
        if state == "PENDING":
            cluster.tool("hurry", job.id)
        elif state in cluster.ENDED:
            row.by_hand.append(f"seed {seed}, {event.name} at step {step}: the job is {state}")
            if submissions == MOST_SUBMISSIONS:
                return
            job.start()
            submissions += 1
        assert time.monotonic() - began < 900, f"{event.name}: job {job.id} is {state}"
        time.sleep(0.5)
    event.heal(job, rng)
    seen = job.steps(0)
    if after := [each for each in seen if each.pid != pid]:
        row.recoveries.append(after[0].time - began)
        row.lost.append(max(e.number for e in seen if e.pid == pid) + 1 - after[0].number)
        if row.lost[-1] > EVERY:
            row.wrong.append(f"seed {seed}, {event.name}: {row.lost[-1]} steps were lost")
    found = differences(job, suite.undisturbed)
    row.wrong += [f"seed {seed}, {event.name} at step {step}: {each}" for each in found]
    if not found:
        shutil.rmtree(job.folder)
