"""What Slurm tells a user beside its nodes: the accounts, and the CPUs of a node that jobs get."""

from dataclasses import dataclass

from hpctrain.base.errors import DistributedError
from hpctrain.cluster.ranks.hostlist import expand_hostlist
from hpctrain.cluster.slurm.node_kinds import NodeKind
from hpctrain.cluster.slurm.partition_limit import value_of
from hpctrain.cluster.slurm.queue import ask, me, rows


@dataclass(frozen=True)
class Association:
    """What a user may have in an account."""

    account: str
    partition: str  # "" for all
    qos: tuple[str, ...]
    default_qos: str


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
