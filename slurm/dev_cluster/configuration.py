"""The files of a cluster: the configuration of Slurm, keys, host names and device nodes."""

from __future__ import annotations

import json
import os
import re
import stat
from pathlib import Path

from dev_cluster.cluster import Cluster
from dev_cluster.command import Failure, run

CPUS, MEMORY_MB, GPUS = 8, 16000, 2  # of each node, as configured in Slurm
SHARDS = 4 * GPUS  # parts of the GPUs

SLURM_CONF = """\
ClusterName=dev
SlurmctldHost=head({head})
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
# Slurm and the jobs run as root, which the namespaces need anyway.
SlurmUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/run/slurmctld.pid
SlurmdPidFile={folder}/run/slurmd-%n.pid
SlurmdLogFile={folder}/log/%n
MailProg=/bin/true
MpiDefault=none
# Without cgroups: Slurm finds processes by their parents and does not pin them to CPUs, since a
# node has more CPUs in Slurm than the machine may have.
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/linux
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
GresTypes={gres}
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost={head}
AccountingStoragePass={folder}/munge/socket
AccountingStorageTRES=gres/gpu
# Slurm notices a dead node after seconds, not after five minutes as on a real cluster.
SlurmdTimeout=20
KillWait=5
# A killed process may wait for a busy disk for a long time; the node is not drained for that.
UnkillableStepTimeout=600
ReturnToService=2
JobRequeue=1
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0,sched_min_interval=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
{nodes}
PartitionName=batch Default=YES Nodes=ALL PriorityTier=10 PreemptMode=OFF
PartitionName=preemptible Nodes=ALL PriorityTier=1 PreemptMode=REQUEUE GraceTime=10
"""

SLURMDBD_CONF = """\
DbdHost=head
DbdAddr={head}
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
SlurmUser=root
PidFile={folder}/run/slurmdbd.pid
StorageType=accounting_storage/mysql
StorageHost=localhost
StorageUser=root
StorageLoc=slurm
"""


def write(cluster: Cluster, count: int, settings: list[str]) -> None:
    """Create the state folder: configuration, key, host names and device nodes."""
    for setting in settings:
        key, given, _ = setting.partition("=")
        if not given or not re.fullmatch(r"[A-Za-z]+", key) or "\n" in setting:
            raise Failure(f"--set {setting}: KEY=VALUE, a line of slurm.conf", 2)
    cluster.folder.mkdir(mode=0o755, exist_ok=True)
    kept = {"nodes": count, "subnet": str(cluster.net)}
    (cluster.folder / "cluster.json").write_text(json.dumps(kept))
    hosts = ["head", *cluster.nodes]
    names = ["net", "log", "run", "state", "spool", "scratch", "dev", "munge", "mariadb"]
    for name in [*names, *(f"nodes/{host}" for host in hosts)]:
        (cluster.folder / name).mkdir(parents=True)
        if name.startswith("nodes/"):  # the node's own disk, which any user may write to
            (cluster.folder / name).chmod(0o1777)
    for host in hosts:
        (cluster.folder / "net" / host).touch()
    for i in range(GPUS):  # devices like /dev/null: Slurm counts them and sets the GPU mask
        os.mknod(cluster.folder / f"dev/nvidia{i}", stat.S_IFCHR | 0o666, os.makedev(1, 3))
    values = {"folder": cluster.folder, "head": cluster.address("head")}
    version = tuple(map(int, re.findall(r"\d+", run("slurmd -V"))[:2]))
    shared = version >= (22, 5)
    values["gres"] = "gpu,shard" if shared else "gpu"
    gpus = f"gpu:{GPUS},shard:{SHARDS}" if shared else f"gpu:{GPUS}"
    values["nodes"] = "\n".join(
        f"NodeName={n} NodeAddr={cluster.address(n)} CPUs={CPUS} RealMemory={MEMORY_MB} "
        f"Gres={gpus} State=UNKNOWN"
        for n in cluster.nodes
    )
    plugin = "disabled" if version >= (23, 2) else "cgroup/v1"  # see ENTER
    addresses = "".join(f"{cluster.address(h)} {h}\n" for h in [*hosts, "host"])
    text = SLURM_CONF.format(**values)
    for setting in settings:  # Slurm does not allow a key twice
        text = re.sub(rf"(?im)^{setting.partition('=')[0]}=.*\n", "", text)
        text = f"{setting}\n{text}"
    files = {
        "slurm.conf": text,
        "slurmdbd.conf": SLURMDBD_CONF.format(**values),
        "gres.conf": f"Name=gpu File={cluster.folder}/dev/nvidia[0-{GPUS - 1}]\n"
        + f"Name=shard Count={SHARDS}\n" * shared,
        "cgroup.conf": f"CgroupPlugin={plugin}\n",
        "hosts": addresses + Path("/etc/hosts").read_text(),
        "munge/key": os.urandom(64).hex(),
    }
    for name, text in files.items():
        (cluster.folder / name).write_text(text)
    for name in ("slurmdbd.conf", "munge/key"):
        (cluster.folder / name).chmod(0o600)
