"""What one rank sees of its node: facts, which are compared over the ranks, and findings.

every rank          its GPU, its cores, its versions
one rank of a node  limits, host names, interfaces, disks
"""

import os
import socket
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from hpctrain.base.files.record import convert
from hpctrain.base.processes.cgroup import cores
from hpctrain.cluster.ranks.ranks import RankInfo, gpus_given
from hpctrain.config.schema import DataConfig, LaunchConfig, NetworkConfig, ParallelConfig
from hpctrain.insight.doctor.checks import file_systems, gpu_health, installed, limits, network
from hpctrain.insight.doctor.checks.gpu_health import OTHERS, GpuFacts
from hpctrain.insight.doctor.finding import Finding, unknown
from hpctrain.insight.monitor.nvidia import Nvidia


@dataclass(frozen=True)
class Expectation:
    """What a job asks for, and where it reads and writes: sections of its config."""

    launch: LaunchConfig
    parallel: ParallelConfig
    network: NetworkConfig
    data: DataConfig
    output_dir: str
    mixed: bool  # its nodes may differ


@dataclass(frozen=True)
class Probe:
    """What one rank has seen."""

    host: str
    rank: int
    local_rank: int
    versions: dict[str, str]  # only the first rank of a node looks
    gpus: list[GpuFacts]
    findings: list[Finding]
    figures: dict[str, float] = field(default_factory=dict)  # in the unit that the name says
    # The identities of all GPUs that it sees, also of those that other ranks look at.
    uuids: list[str] = field(default_factory=list)
    gpus_given: int = 0  # that its node should have; 0 if not counted
    peers: int = 1  # ranks on its node

    @classmethod
    def of_json(cls, facts: dict[str, Any]) -> Self:
        """Return the look whose facts are these; one of another form is a DamageError."""
        return convert(cls, facts, "the answer of a rank")


def probe(
    asked: Expectation,
    ranks: RankInfo,
    uuids: list[str],
    *,
    disks: bool,
    library: Nvidia | None = None,
) -> Probe:
    """Return what this rank sees; the GPUs are those that torch sees.

    With `disks` files are written into their folders.
    """
    own = own_gpus(uuids, ranks)
    alone = len(uuids) == 1 < ranks.local_world_size  # the rank's GPU is 0 to itself
    first = ranks.local_rank if alone else min(own, default=0)
    nccl = bool(uuids) and asked.parallel.backend != "gloo" and ranks.world_size > 1
    gpus, findings = gpu_health.checked([uuids[each] for each in own], first, library, nccl=nccl)
    if asked.launch.gpus_per_run is not None:  # others use its GPU, too
        findings = [one for one in findings if not one.check.endswith(OTHERS)]
    findings.append(limits.cpus(len(os.sched_getaffinity(0)), cores(), asked.launch.cpus_per_task))
    if ranks.local_rank == 0:
        findings += _of_node(asked, ranks, uuids, disks, nccl)
    versions: dict[str, str] = {}
    if ranks.local_rank == 0:
        versions = installed.versions() | {"InfiniBand": network.infiniband_rates()}
    return Probe(
        socket.gethostname(),
        ranks.rank,
        ranks.local_rank,
        versions,
        gpus,
        findings,
        uuids=uuids,
        gpus_given=0 if asked.parallel.device == "cpu" else gpus_given(asked.launch.gpus_per_node),
        peers=ranks.local_world_size,
    )


def own_gpus(uuids: list[str], ranks: RankInfo) -> list[int]:
    """Return the numbers of the GPUs that this rank looks at: together the ranks see each once."""
    if len(uuids) < ranks.local_world_size:  # each rank sees GPUs of its own
        return list(range(len(uuids)))
    return list(range(ranks.local_rank, len(uuids), ranks.local_world_size))


def _of_node(
    asked: Expectation, ranks: RankInfo, uuids: list[str], disks: bool, nccl: bool
) -> Iterator[Finding]:
    by_infiniband = nccl and ranks.num_nodes > 1 and network.uses_infiniband()
    if by_infiniband:
        yield (found := network.infiniband_library())
        by_infiniband = found.result == "pass"
    yield from limits.checked(ranks.local_world_size if uuids else 0, by_infiniband)
    yield network.host_name(ranks)
    yield from network.interface(asked.network.interface, nccl)
    if asked.parallel.device == "cpu" and gpus_given(asked.launch.gpus_per_node):
        yield unknown("GPUs", "parallel.device=cpu: they are not looked at")
    yield from file_systems.checked("output_dir", Path(asked.output_dir), write=disks)
    data, temporary = asked.data, os.environ.get("SLURM_TMPDIR") or tempfile.gettempdir()
    # The job cannot train without copies of the data there.
    stages = data.stage == "node" or "://" in data.path
    for one in file_systems.checked("scratch", Path(data.stage_dir or temporary), write=disks):
        yield one if stages or one.result != "fail" else replace(one, result="warn")
    if data.path and "://" not in data.path:
        yield file_systems.readable(Path(data.path))
