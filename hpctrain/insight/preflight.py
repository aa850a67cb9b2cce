"""`launch.preflight`: check the nodes of a job before it trains.

all ranks   look, compare ── no failure ── train
rank 0      tells what was found
            a node has failed ── it is excluded, the run goes on without it ── all ranks end

Ranks that do not find their GPUs end before they can look. If a GPU had a fault in the attempt
before, `lost_gpu` excludes its node.

Every training under Slurm imports this file, whatever it asks for, so what looks at a node is only
imported where that is asked.

The run goes on without the node while the budget of restarts lasts (`runs.state.verdict`). A
failure that is not the fault of one node, such as a full file system, ends the run.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from hpctrain.base.errors import NodeError, StorageError
from hpctrain.base.processes.causes import NODE
from hpctrain.base.terminal.terminal import few
from hpctrain.cluster.ranks import epochs
from hpctrain.cluster.ranks.ranks import RankInfo
from hpctrain.config.job_request import JobRequest
from hpctrain.config.schema import DataConfig, LaunchConfig, NetworkConfig, ParallelConfig
from hpctrain.engine.distributed import objects
from hpctrain.runs.run_dir import RunDir
from hpctrain.runs.state.end import End
from hpctrain.runs.state.failure import described
from hpctrain.runs.state.verdict import go_on

if TYPE_CHECKING:
    from hpctrain.insight.doctor.comparison import Places
    from hpctrain.insight.doctor.probe import Expectation

log = logging.getLogger(__name__)


def check_nodes(
    job: JobRequest,
    parallel: ParallelConfig,
    network: NetworkConfig,
    data: DataConfig,
    run: RunDir,
    ranks: RankInfo,
    device: torch.device,
) -> None:
    """Check the nodes; all ranks call it, in their process group, and all raise NodeError."""
    mode = job.launch.preflight
    if mode == "off":
        return
    from hpctrain.insight.doctor.probe import Expectation

    begin = time.monotonic()
    asked = Expectation(job.launch, parallel, network, data, job.output_dir, job.mixed)
    places = checked(asked, ranks, device, full=mode == "full")
    bad = _remember(job.output_dir, ranks, places) if ranks.is_main else []
    if ranks.is_main:
        seconds = time.monotonic() - begin
        nodes = f"{len(places)} node{'s' * (len(places) > 1)}"
        log.info("launch.preflight=%s: %s checked in %.1f s", mode, nodes, seconds)
    failed = [
        f"{host}: {one.check}: {one.found}" + (f" (expected: {one.expected})" * bool(one.expected))
        for host, findings in places.items()
        for one in findings
        if one.result == "fail"
    ]
    if not failed:
        return
    error = NodeError(
        f"launch.preflight={mode}: {few(failed, 5, '; ')}; launch.preflight=off trains all the same"
    )
    if ranks.is_main and bad:
        go_on(run, ranks, End(NODE, described(error), hosts=tuple(bad), bad=True), job)
    objects.broadcast(None)  # Slurm ends all ranks with the first, so rank 0 decides before
    raise error


def wait_for_gpus(device: str, launch: LaunchConfig, run: RunDir, ranks: RankInfo) -> None:
    """Wait until this rank's GPUs, which it does not use yet, are free of the step before.

    A process that cannot be killed keeps its memory: after a minute the log says so.
    """
    home = Path(ranks.worker or run.path)
    alone = device != "cpu" and launch.gpus_per_run is None
    if alone and epochs.follows(home, ranks.attempt_key):
        from hpctrain.insight.doctor.checks import gpu_health
        from hpctrain.insight.doctor.measures import node_job
        from hpctrain.insight.doctor.probe import own_gpus

        uuids = node_job.visible_gpus(device)
        left = gpu_health.wait_until_free([uuids[each] for each in own_gpus(uuids, ranks)])
        for each in left:
            log.warning("%s: %s, still of the step before", ranks.host(ranks.rank), each)


def lost_gpu(job: JobRequest, run: RunDir, ranks: RankInfo, hosts: Sequence[str]) -> list[str]:
    """Exclude hosts that have lost a GPU; rank 0 calls it. Return those to go on without.

    Of the `hosts`, which show fewer GPUs than the job has there, it is the one on which a GPU had a
    fault in the attempt before; or each, if other hosts of the job show all of theirs. Else torch
    or the config may be to blame.
    """
    from hpctrain.insight.doctor.finding import bad

    before = [one.reason for one in run.read().attempts[-2:-1]]
    why = {host: text for host in hosts for text in before if f"GPU fault on {host}: " in text}
    if len({*hosts}) < len(ranks.hosts):
        why = dict.fromkeys(hosts, "the other nodes show all of theirs") | why
    places = {
        host: [bad("silent GPU", "fail", f"fewer than the job has: {each}", "number of GPUs")]
        for host, each in why.items()
    }
    if not places or job.launch.preflight == "off":
        return []
    return _remember(job.output_dir, ranks, places)


def checked(asked: Expectation, ranks: RankInfo, device: torch.device, *, full: bool) -> Places:
    """Return what is found on each host; if `full`, it is measured, too. All ranks call it."""
    from hpctrain.insight.doctor import comparison
    from hpctrain.insight.doctor.measures import node_job
    from hpctrain.insight.doctor.probe import Probe, probe

    seen = probe(asked, ranks, node_job.visible_gpus(asked.parallel.device), disks=full)
    seen = node_job.measured(ranks, device, seen) if full else seen
    looks = [Probe.of_json(each) for each in objects.all_gather(asdict(seen))]
    return comparison.compared(looks, mixed=asked.mixed)


def _remember(output_dir: str, ranks: RankInfo, places: Places) -> list[str]:
    """Log what was found, exclude nodes; return the failed ones if the run may go on without."""
    from hpctrain.insight.doctor.finding import exclude, worst

    for host, findings in places.items():
        for one in findings:
            if one.result in ("warn", "fail"):
                level = logging.WARNING if one.result == "warn" else logging.ERROR
                log.log(level, "%s: %s: %s. %s", host, one.check, one.found, one.cure)
    failed: Iterable[str] = ()
    with suppress(OSError, StorageError):  # a full disk, which is among the findings
        failed = exclude(output_dir, places)
    whole = [host for host, findings in places.items() if worst(findings) == "fail"]
    # Another try would find the same, unless all failures are those of single nodes.
    return sorted(whole) if set(whole) == set(failed) and ranks.launcher == "slurm" else []
