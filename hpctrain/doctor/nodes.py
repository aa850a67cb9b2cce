"""Check nodes by one short job, and compare what its ranks have seen."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from tempfile import TemporaryDirectory

from hpctrain.config.schema import Config
from hpctrain.distributed.rendezvous.hostlist import expand_hostlist
from hpctrain.doctor import comparison, failed_hosts, history, node_job
from hpctrain.doctor.comparison import Places
from hpctrain.doctor.finding import Finding
from hpctrain.doctor.probe import Expectation, Probe
from hpctrain.errors import LaunchError
from hpctrain.launch import function
from hpctrain.slurm import queue
from hpctrain.slurm.excluded_hosts import folder_of

_TIME_MIN = 10


def checked(config: Config, here: bool) -> tuple[Places, dict[str, dict[str, float]]]:
    """Submit the job, wait for it, and return the findings and the figures of each host.

    What is found is added to the history of the hosts, and to the list of hosts that new jobs
    avoid. The ranks are started on this machine if `here`. A refused job, or one that has ended
    without any answer, is a LaunchError.
    """
    time_min, asked = config.launch.time_min, Expectation.of(config)
    config.launch.time_min = min(time_min, _TIME_MIN) if isinstance(time_min, int) else _TIME_MIN
    if config.name == Config().name:
        config.name = "doctor"
    folder = folder_of(config.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    # The ranks leave the secret here by which they know each other.
    with TemporaryDirectory(dir=folder, prefix="ranks-", ignore_cleanup_errors=True) as meeting:
        arguments = [asdict(asked), meeting]
        job = function.submit(config, node_job.check, arguments, {}, here)
        # Standard output may be JSON.
        print(f"job {job.job_id} checks the nodes; its logs: {job.paths.folder}", file=sys.stderr)
        answers = job.answers()
    looks = [Probe.of_json(facts) for facts in answers.values()]
    ranks = config.asked_world_sizes[0]
    if not looks:
        raise LaunchError(f"job {job.job_id}: no rank has answered; see {job.paths.folder}")
    places = comparison.compared(looks, mixed=asked.mixed)
    if missing := sorted(set(range(ranks)) - answers.keys()):
        _add_missing(places, missing, config, job.job_id)
    figures = comparison.figures(looks)
    history.add(config.output_dir, "doctor", places, figures)
    failed_hosts.exclude(config.output_dir, places)
    return places, figures


def _add_missing(places: Places, missing: Sequence[int], config: Config, job_id: str) -> None:
    """Add a failure to the node of each rank that has not answered."""
    ended = queue.ended([job_id.partition("_")[0]]) or {}
    listed = ended[job_id].nodes if job_id in ended else ""
    hosts = expand_hostlist(listed) if listed and listed[0] != "N" else []
    for rank in missing:
        number = rank // config.launch.tasks_per_node
        host = hosts[number] if number < len(hosts) else f"node {number} of the job"
        cure = "See the logs of the job; the node may be down or without memory."
        finding = Finding("answer", "fail", f"rank {rank} has not answered", "an answer", cure)
        places.setdefault(host, []).append(finding)
