"""What Slurm tells of a cluster: its kinds of nodes, and what a user may have.

    sinfo ── NodeKind        sacctmgr ── Association

Each is one call, whatever the size of the cluster. Nothing here decides anything.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

from hpctrain.cluster.ranks.hostlist import expand_hostlist
from hpctrain.cluster.slurm.partition_limit import minutes, value_of
from hpctrain.cluster.slurm.queue import NO_CONTROLLER, UnreachableError, ask, me, rows
from hpctrain.errors import DistributedError

_SINFO = "%P|%a|%l|%h|%D|%c|%Z|%G|%f|%N"
_KIND = (r"[^|]+", "[a-z]+", r"[\w:-]+", r"[^|]+", r"\d+", *[r"\d+\+?"] * 2, *[r"[^|]*"] * 3)
_NONE = ("", "(null)", "N/A")


@dataclass(frozen=True)
class NodeKind:
    """Nodes of a partition that are alike."""

    partition: str
    is_open: bool  # jobs may be submitted to the partition
    is_default: bool  # it is the partition of jobs that name none
    is_whole: bool  # its jobs get whole nodes
    most_min: float  # the longest time limit of a job
    nodes: int
    cpus: int  # as Slurm counts them: threads, where it knows of them
    threads: int  # of a core
    gpus: dict[str, int]  # of a node, by their type, which is "" if Slurm knows none
    features: frozenset[str]
    hosts: str  # a Slurm hostlist

    @property
    def gpu_count(self) -> int:
        """The GPUs of a node, whatever their types."""
        return sum(self.gpus.values())


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
    for name, state, most, shared, nodes, cpus, threads, *words in rows(answer, _KIND):
        gres, features, hosts = words
        # Of `gpu:a100:4(S:0-1)` what is in brackets says to which sockets they belong.
        devices = [each for each in re.sub(r"\([^)]*\)", "", gres).split(",") if each]
        gpus: dict[str, int] = {}
        for device in devices:
            if found := re.fullmatch(r"gpu(?::([^:]+))?:(\d+)", device):
                gpus[found[1] or ""] = gpus.get(found[1] or "", 0) + int(found[2])
        yield NodeKind(
            name.rstrip("*"),
            state == "up",
            name.endswith("*"),
            shared.startswith("EXCLUSIVE"),
            minutes(most) if ":" in most else math.inf,
            int(nodes),
            int(cpus.rstrip("+")),
            int(threads.rstrip("+")),
            gpus,
            frozenset(features.split(",") if features not in _NONE else ()),
            hosts,
        )


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
    effective = value_of(said, "CPUEfctv")
    return int(effective) if effective.isdecimal() else kind.cpus
