"""What slurmctld, the controller of Slurm, says about nodes and jobs."""

from __future__ import annotations

import contextlib

from dev_cluster.cluster import Cluster
from dev_cluster.command import Failure, run, wait_for


def node_states() -> dict[str, str]:
    """Return the state of each node in slurmctld: `idle`, `mixed`, `down*`, ..."""
    lines = run("sinfo -h -N -o '%N %T'", check=False).splitlines()
    return {line.split()[0]: line.split()[1] for line in lines}


def hurt(cluster: Cluster) -> list[str]:
    """Return the nodes that slurmctld cannot use."""
    usable = ("idle", "mixed", "allocated", "completing")
    states = node_states()
    daemons = cluster.daemons()
    return [n for n in cluster.nodes if states.get(n) not in usable or not daemons[n, "slurmd"]]


def head_is_up(cluster: Cluster) -> bool:
    """Return whether the daemons on `head` are alive and slurmctld answers."""
    alive = all(pid for (host, _), pid in cluster.daemons().items() if host == "head")
    if not cluster.nodes or not alive:
        return False
    with contextlib.suppress(Failure):  # on a busy machine slurmctld may answer late
        wait_for("slurmctld answers", node_states, 30)
        return True
    return False


def jobs(job: str) -> list[list[str]]:
    """Return state, partition, nodes and number of nodes of a job, or of each task of an array."""
    lines = run(["squeue", "-h", "-j", job, "-o", "%T|%P|%N|%D"], check=False).splitlines()
    return [line.split("|") for line in lines]
