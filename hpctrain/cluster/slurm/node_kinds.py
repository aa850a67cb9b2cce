"""The kinds of nodes of a cluster, by one call of `sinfo`, whatever the size of the cluster.

Their GPUs may have parts, which Slurm gives to jobs and steps as its gres `shard` or `mps`:

    gpu:2,shard:8 ── 4 parts a GPU ── launch.gpus_per_run=0.25 ── a step asks for shard:1
                                   ── launch.pack=3            ── the job asks for shard:3

Slurm takes all parts of a job on a node from one GPU, and steps with `--exact` have their parts of
it at the same time. It divides neither the memory nor, with `shard`, the time of the GPU.
"""

import functools
import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from hpctrain.base.errors import ConfigError
from hpctrain.cluster.slurm.partition_limit import minutes
from hpctrain.cluster.slurm.queue import NO_CONTROLLER, UnreachableError, ask, rows
from hpctrain.config.schema import LaunchConfig, SiteConfig

_SINFO = "%P|%a|%l|%h|%m|%D|%c|%Z|%G|%f|%N"
_COUNT = r"\d+\+?"
_KIND = (r"[^|]+", "[a-z]+", r"[\w:-]+", r"[^|]+", _COUNT, r"\d+", *[_COUNT] * 2, *[r"[^|]*"] * 3)
_NONE = ("", "(null)", "N/A")
_PARTS = ("mps", "shard")
"""The better one first: with both, Slurm 22.05 does not tell a step of a shard which GPU it has."""


@dataclass(frozen=True)
class NodeKind:
    """Nodes of a partition that are alike; those that are down or drained count, too."""

    partition: str
    is_open: bool  # jobs may be submitted to the partition
    is_default: bool  # it is the partition of jobs that name none
    is_whole: bool  # its jobs get whole nodes
    most_min: float  # the longest time limit of a job
    memory_mib: int  # of a node, which Slurm calls MB
    nodes: int
    cpus: int  # as Slurm counts them: threads, where it knows of them
    threads: int  # of a core
    devices: Counter[tuple[str, str]]  # of a node, by gres and type, which is "" if it has none
    features: frozenset[str]
    hosts: str  # a Slurm hostlist

    def count(self, gres: str = "gpu", kind: str | None = None) -> int:
        """Return how many devices of a gres a node has, of one type if that is given."""
        found = {key: n for key, n in self.devices.items() if key[0] == gres}
        return sum(n for (_, its), n in found.items() if not kind or its.lower() == kind.lower())

    @property
    def gpus(self) -> dict[str, int]:
        """The GPUs of a node by their type."""
        return {kind: n for (name, kind), n in self.devices.items() if name == "gpu"}


def kinds() -> list[NodeKind]:
    """Return the kinds of nodes of each partition; no answer is an UnreachableError."""
    words = ("--noheader", "--exact", "--noconvert", f"--format={_SINFO}")  # 1024 CPUs, not 1K
    answer = ask("sinfo", *words, quiet=True)
    if answer is None:
        raise UnreachableError(NO_CONTROLLER)
    return [*_kinds(answer)]


def kinds_in(partition: str | None) -> list[NodeKind]:
    """Return those of the partitions that the text names, or of the default one."""
    names = (partition or "").split(",")
    return [k for k in kinds() if (k.partition in names if partition else k.is_default)]


def _kinds(answer: str) -> Iterator[NodeKind]:
    for name, state, most, shared, memory, nodes, *words in rows(answer, _KIND):
        cpus, threads, gres, features, hosts = words
        devices = Counter[tuple[str, str]]()
        # Of `gpu:a100:4(S:0-1)` what is in brackets says to which sockets they belong.
        for device in re.sub(r"\([^)]*\)", "", gres).split(","):
            if found := re.fullmatch(r"([^:]+)(?::([^:]+))?:(\d+)", device):
                devices[found[1], found[2] or ""] += int(found[3])
        yield NodeKind(
            name.rstrip("*"),
            state == "up",
            name.endswith("*"),
            shared.startswith("EXCLUSIVE"),
            minutes(most) if ":" in most else math.inf,
            int(memory.rstrip("+")),
            int(nodes),
            int(cpus.rstrip("+")),
            int(threads.rstrip("+")),
            devices,
            frozenset(features.split(",") if features not in _NONE else ()),
            hosts,
        )


def parts_option(launch: LaunchConfig, site: SiteConfig, runs: int) -> dict[str, str]:
    """Return the option of sbatch or srun for the parts of a GPU that so many runs need.

    A partition that does not offer them is a ConfigError, and no answer an UnreachableError.
    """
    share, where = launch.gpus_per_run or 1.0, site.partition or "that is the default one"
    found = _offered(site.partition)
    kind = next((each for each in _PARTS if found[each]), None)
    if kind is None:
        raise ConfigError(
            f"launch.gpus_per_run={share:g}: no node of the partition {where} has parts of GPUs "
            "(`sinfo -o %G` shows neither shard nor mps). The site must offer them, with GresTypes="
            "gpu,shard in slurm.conf, and in gres.conf Name=shard and a Count of several for each "
            "GPU; else leave the key out"
        )
    # Nodes may divide their GPUs otherwise: a run gets no less than its share on any of them.
    each = max(math.ceil(share * parts - 1e-6) for parts in found[kind])
    if runs * each > max(found[kind]):
        raise ConfigError(
            f"launch.gpus_per_run={share:g} with launch.pack={launch.pack}: the GPUs of the "
            f"partition {where} have {max(found[kind])} parts ({kind}), of which a run needs {each}"
        )
    return {"gres": f"{kind}:{runs * each}"}


@functools.cache
def _offered(partition: str | None) -> dict[str, set[int]]:
    """Return by kind into how many parts the nodes of the partition divide each of their GPUs."""
    found: dict[str, set[int]] = {kind: set() for kind in _PARTS}
    for nodes in kinds_in(partition):
        for kind in _PARTS:
            if (gpus := nodes.count()) and (parts := nodes.count(kind) // gpus):
                found[kind].add(parts)
    return found
