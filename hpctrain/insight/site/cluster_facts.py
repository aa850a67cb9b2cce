"""What Slurm tells of a cluster: its kinds of nodes, its partitions, and what a user may have.

    sinfo ── NodeKind    scontrol show partition ── Partition    sacctmgr ── Association

Each is one call, whatever the size of the cluster. Nothing here decides anything.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from hpctrain.cluster.ranks.hostlist import expand_hostlist
from hpctrain.cluster.slurm.partition_limit import minutes, partition_lines, value_of
from hpctrain.cluster.slurm.queue import NO_CONTROLLER, UnreachableError, ask, me, rows
from hpctrain.errors import DistributedError

_SINFO = "%R|%a|%D|%c|%Z|%G|%f|%N"
_KIND = (r"[^|]+", "[a-z]+", r"\d+", r"\d+\+?", r"\d+\+?", r"[^|]*", r"[^|]*", r".*")
_NONE = ("", "(null)", "N/A")


@dataclass(frozen=True)
class NodeKind:
    """Nodes of a partition that are alike."""

    partition: str
    is_open: bool  # jobs may be submitted to the partition
    nodes: int
    cpus: int  # as Slurm counts them: threads, where it knows of them
    threads: int  # of a core
    gpus: dict[str, int]  # of a node, by their type, which is "" if Slurm knows none
    other_gres: tuple[str, ...]  # such as nvme:3600
    features: frozenset[str]
    hosts: str  # a Slurm hostlist

    @property
    def gpu_count(self) -> int:
        """The GPUs of a node, whatever their types."""
        return sum(self.gpus.values())


@dataclass(frozen=True)
class Partition:
    """What a partition allows."""

    name: str
    is_default: bool
    is_whole: bool  # jobs get whole nodes
    max_min: float
    accounts: frozenset[str] | None  # None: all


@dataclass(frozen=True)
class Association:
    """What a user may have in an account."""

    account: str
    partition: str  # "" for all
    qos: tuple[str, ...]
    default_qos: str


def kinds() -> list[NodeKind]:
    """Return the kinds of nodes of each partition; no answer is an UnreachableError."""
    answer = ask("sinfo", "--noheader", "--exact", f"--format={_SINFO}", quiet=True)
    if answer is None:
        raise UnreachableError(NO_CONTROLLER)
    return [*_kinds(answer)]


def _kinds(answer: str) -> Iterator[NodeKind]:
    for name, state, nodes, cpus, threads, gres, features, hosts in rows(answer, _KIND):
        # Of `gpu:a100:4(S:0-1)` what is in brackets says to which sockets they belong.
        devices = [each for each in re.sub(r"\([^)]*\)", "", gres).split(",") if each]
        gpus: dict[str, int] = {}
        for device in devices:
            if found := re.fullmatch(r"gpu(?::([^:]+))?:(\d+)", device):
                gpus[found[1] or ""] = gpus.get(found[1] or "", 0) + int(found[2])
        others = [each for each in devices if each.partition(":")[0] not in ("gpu", *_PARTS)]
        yield NodeKind(
            name,
            state == "up",
            int(nodes),
            int(cpus.rstrip("+")),
            int(threads.rstrip("+")),
            gpus,
            tuple(others),
            frozenset(features.split(",") if features not in _NONE else ()),
            hosts,
        )


_PARTS = ("shard", "mps")  # of GPUs, which launch.gpus_per_run asks for


def partitions() -> dict[str, Partition]:
    """Return what each partition allows, by name."""
    found = {}
    for line in partition_lines():
        name, accounts = value_of(line, "PartitionName"), value_of(line, "AllowAccounts")
        try:
            most = minutes(value_of(line, "MaxTime"))
        except ValueError:
            most = float("inf")
        found[name] = Partition(
            name,
            value_of(line, "Default") == "YES",
            value_of(line, "OverSubscribe").startswith("EXCLUSIVE"),
            most,
            None if accounts in (*_NONE, "ALL") else frozenset(accounts.split(",")),
        )
    return found


def associations() -> list[Association] | None:
    """Return what this user may have; None if there is no accounting, or it does not answer."""
    command = ("sacctmgr", "--noheader", "--parsable2", "show", "associations", f"user={me()}")
    answer = ask(*command, "format=account,partition,qos,defaultqos", quiet=True)
    if answer is None:
        return None
    return [
        Association(account, partition, tuple(filter(None, qos.split(","))), default)
        for account, partition, qos, default in rows(answer, [r"[^|]*"] * 4)
        if account
    ]


def usable_cpus(kind: NodeKind) -> int:
    """Return the CPUs of a node that jobs get: some sites keep a few for the system."""
    try:
        (first, *_) = expand_hostlist(kind.hosts)
    except (DistributedError, ValueError):
        return kind.cpus
    said = ask("scontrol", "--oneliner", "show", "node", first, quiet=True) or ""
    if (effective := value_of(said, "CPUEfctv")).isdecimal():
        return int(effective)
    kept = value_of(said, "CoreSpecCount")  # Slurm before 22.05 has no CPUEfctv
    return kind.cpus - kind.threads * int(kept) if kept.isdecimal() else kind.cpus
