"""Start a whole cluster, or what is missing of it; end it and delete its files."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from dev_cluster import configuration, network, requirements
from dev_cluster.cluster import Cluster
from dev_cluster.command import Failure, run
from dev_cluster.configuration import CPUS, GPUS
from dev_cluster.controller import hurt, node_states
from dev_cluster.daemons import Daemons
from dev_cluster.faults import heal


@contextlib.contextmanager
def setup_lock() -> Iterator[None]:
    """Hold a lock of this machine: two processes in `up` or `down` would disturb each other.

    It is on a folder that every copy of this tool knows.
    """
    lock = os.open("/var/tmp", os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def start(cluster: Cluster, count: int | None, settings: list[str]) -> bool:
    """Start the cluster; if a part of it runs, start what is missing and heal its nodes.

    Return whether it was started anew.
    """
    begin, daemons = time.monotonic(), Daemons(cluster)
    if any(pid for (host, _), pid in cluster.daemons().items() if host == "head"):
        if count not in (None, len(cluster.nodes)) or settings:
            raise Failure(f"already up with {len(cluster.nodes)} nodes: first `down`")
        if revived := daemons.revive_head():
            print(f"started again, with queue and accounting: {', '.join(revived)}")
        states = node_states()
        for node in hurt(cluster):
            heal(cluster, node)
            print(f"healed {node}, which was {states.get(node, 'unknown')}")
        print(f"already up: {len(cluster.nodes)} nodes")
        return False
    if cluster.nodes:  # for example after a reboot
        print("no daemon is left on head: its queue, accounting and jobs are deleted", flush=True)
    end(cluster)
    requirements.check(cluster)
    _start_anew(daemons, count or 4, settings)
    print(
        f"up in {time.monotonic() - begin:.0f} s: {len(cluster.nodes)} nodes with {CPUS} CPUs and "
        f"{GPUS} fake GPUs each; state in {cluster.folder}"
    )
    return True


def _start_anew(daemons: Daemons, count: int, settings: list[str]) -> None:
    """Start everything; if something fails, delete everything and raise."""
    cluster = daemons.cluster
    try:
        configuration.write(cluster, count, settings)
        network.make(cluster)
        daemons.start_head()
        for node in cluster.nodes:
            daemons.start(node, "slurmd -D")
        daemons.wait("all nodes are idle", lambda: not hurt(cluster))
    except BaseException:  # also Ctrl-C
        daemons.kill()
        end(cluster)
        raise


def end(cluster: Cluster, keep_logs: bool = False) -> None:
    """End every process, undo every mount and link, delete the state folder."""
    cluster.check_folder()
    cluster.kill()
    mounts = [line.split()[1] for line in Path("/proc/self/mounts").read_text().splitlines()]
    for mount in reversed(mounts):
        if mount.startswith(f"{cluster.folder}/"):
            run(f"umount {mount}")
    network.delete(cluster)
    if keep_logs and (cluster.folder / "log").exists():
        kept = Path(f"{cluster.folder}.logs")
        shutil.rmtree(kept, ignore_errors=True)
        (cluster.folder / "log").rename(kept)
        print(f"logs: {kept}")
    for path in cluster.folder.glob("*/"):
        shutil.rmtree(path)
    if cluster.folder.exists():
        shutil.rmtree(cluster.folder)  # cluster.json last: it shows that the folder is ours
