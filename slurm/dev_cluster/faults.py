"""What can happen to a job on a real cluster, and how to undo it."""

from __future__ import annotations

import os

from dev_cluster.cluster import Cluster
from dev_cluster.command import Failure, run, wait_for
from dev_cluster.controller import hurt, jobs, node_states
from dev_cluster.daemons import Daemons
from dev_cluster.network import ip


def cut(cluster: Cluster, node: str) -> None:
    """Take down the network link of a node."""
    ip(cluster, "head", f"link set {node} down")


def heal(cluster: Cluster, node: str) -> None:
    """Make a node usable: set the link up, start slurmd, resume the node in slurmctld."""
    ip(cluster, "head", f"link set {node} up")
    if node_states().get(node, "").startswith(("down", "drained", "fail")):
        cluster.kill(node)  # Slurm has given up the jobs; a reboot ends their processes
    if not cluster.daemons()[node, "slurmd"]:
        Daemons(cluster).start(node, "slurmd -D")

    def well() -> bool:
        if node_states().get(node, "").startswith(("down", "drain", "fail")):
            run(f"scontrol update NodeName={node} State=RESUME", check=False)
        return node not in hurt(cluster)

    wait_for(f"{node} is usable (logs: {cluster.folder}/log)", well)


def preempt(job: str) -> None:
    """Preempt a job with an exclusive job on the same nodes, in a partition of higher priority."""
    found = jobs(job)
    if len(found) != 1 or found[0][:2] != ["RUNNING", "preemptible"]:
        seen = "; ".join(f"{state} in {partition}" for state, partition, *_ in found)
        raise Failure(f"job {job} is {seen or 'gone'}; it must be one job RUNNING in preemptible")
    _, _, nodes, count = found[0]
    for name in list(os.environ):  # inside an allocation the new job would use these
        if name.startswith(("SLURM_", "SBATCH_")) and name != "SLURM_CONF":
            del os.environ[name]
    where = f"--partition=batch --nodes={count} --nodelist={nodes} --exclusive --time=1"
    how = f"--parsable --job-name=preempt-{job} --output=/dev/null --chdir=/"
    other = run(f"sbatch {where} {how} --wrap='sleep 3'")

    def preempted() -> bool:
        if " PreemptTime=2" in run(f"scontrol -o show job {job}", check=False):
            return True
        if not (seen := jobs(job)):
            raise Failure(f"job {job} ended by itself before it was preempted")
        return seen[0][0] == "PENDING"  # the job has requeued itself already

    try:
        wait_for(f"Slurm preempts job {job}", preempted, 20)
    except Failure:
        run(f"scancel {other}", check=False)
        raise
    print(f"job {other} takes {nodes} from job {job}, which has got SIGTERM. If it still runs in")
    print("10 s, it is requeued and starts again 2 minutes later, or at once with `hurry`")


def hurry(job: str) -> None:
    """Let a requeued job start now; if it is still ending, first wait for the requeue."""
    if not jobs(job):
        raise Failure(f"job {job} is neither waiting nor running")
    wait_for(f"job {job} is pending", lambda: {j[0] for j in jobs(job)} == {"PENDING"})
    # Slurm kills a job that starts in the second of its requeue: "Job credential revoked".
    run(f"scontrol update JobId={job} StartTime=now+2")
    print(f"job {job} starts as soon as there are nodes")
