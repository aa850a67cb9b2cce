"""All checks of a login node: versions, Slurm, storage, and the MLflow store."""

import math
from collections.abc import Iterator
from pathlib import Path

from hpctrain.base.errors import ConfigError, HpctrainError, TrackingError
from hpctrain.cluster.slurm import excluded_hosts, release, sbatch
from hpctrain.cluster.slurm.partition_limit import beyond_partition, road
from hpctrain.cluster.slurm.queue import UnreachableError, ask
from hpctrain.cluster.slurm.script import sbatch_script
from hpctrain.config.job_request import JobRequest
from hpctrain.config.schema import LaunchConfig, SiteConfig, TrackingConfig
from hpctrain.insight.doctor.checks import file_systems, installed
from hpctrain.insight.doctor.finding import Finding, bad, good, judged, unknown
from hpctrain.insight.estimates import site_rules
from hpctrain.tracking import store


def checked(
    job: JobRequest, data: str, tracking: TrackingConfig, idle_minutes: float
) -> Iterator[Finding]:
    """Yield what is found here, on this host; `data` is "" if no data set is named."""
    yield from installed.checked()
    yield from slurm(job)
    yield from _rules(job.site.rules, idle_minutes)
    yield from file_systems.checked("output_dir", Path(job.output_dir))
    yield from _data(data)
    yield mlflow_store(tracking)
    yield _excluded(job.output_dir)


def _rules(path: str | None, idle_minutes: float) -> Iterator[Finding]:
    """Check the rules of the site, and that the monitor warns before its mail comes."""
    if path is None:
        return
    try:
        rules = site_rules.read(path)
    except ConfigError as error:
        yield bad("rules", "fail", str(error), "site.rules")
        return
    most = rules["idle_job"].limit if "idle_job" in rules else math.inf
    shown = "; ".join(rule.says for rule in rules.values())
    yield judged("site.rules", idle_minutes < most, shown, most=most)


def _data(path: str) -> Iterator[Finding]:
    if not path:
        yield unknown("data.path", "no data set is named", "Add experiment=NAME or data.path=PATH.")
    elif "://" in path:
        yield unknown("data.path", f"{path} is a URL", "Its speed shows in `bench --data-only`.")
    else:
        yield file_systems.readable(Path(path))


def _excluded(output_dir: str) -> Finding:
    hosts = excluded_hosts.read(output_dir)
    if not hosts:
        return good("excluded nodes", "none")
    shown = ", ".join(f"{host} ({facts.why})" for host, facts in sorted(hosts.items()))
    return bad("excluded nodes", "warn", shown, host=min(hosts))


def mlflow_store(tracking: TrackingConfig) -> Finding:
    """Check `tracking.uri` as a submission does, without importing mlflow."""
    check, uri = "MLflow", str(tracking.uri)
    if not tracking.enabled:
        return good(check, "tracking.enabled=false")
    try:
        store.check_uri(uri)
        if not store.is_server(uri) and not store.sqlite_path(uri).exists():
            return good(check, f"{uri} is made by the first run")
        takes = store.check_store(uri, tracking.experiment)
    except TrackingError as error:
        return bad(check, "fail", str(error))
    said = "takes runs" if takes else "takes no runs now: the log says why"
    return judged("MLflow server", takes, f"{uri} {said}", check=check)


def slurm(job: JobRequest) -> Iterator[Finding]:
    """Check whether Slurm answers, and would run such a job."""
    if not sbatch.available():
        yield unknown(
            "Slurm",
            "no sbatch on the PATH",
            "This host cannot submit jobs: runs train on this machine; on a cluster, log in to a "
            "login node or load its module.",
        )
        return
    answer = ask("scontrol", "ping", quiet=True)
    if answer is None or " is UP" not in answer:
        yield bad("Slurm's controller", "fail", " ".join((answer or "no answer").split()))
        return
    up = [line.strip() for line in answer.splitlines() if " is UP" in line]
    yield good("Slurm's controller", ", ".join([release.words() or "version unknown", *up]))
    yield from _partition(job.launch, job.site)
    yield _job(job)


def _partition(launch: LaunchConfig, site: SiteConfig) -> Iterator[Finding]:
    """Check what the partition allows a job: its time, and to come back."""
    beyond = beyond_partition(launch, site.partition)
    shown = beyond or f"{launch.time_min} minutes (launch.time_min)"
    yield judged("time limit", not beyond, shown, "fail")
    check, found = "after a preemption", road(site, launch.chain)
    if not found.name:
        yield unknown(check, "scontrol does not answer")
    elif found.name == "by hand":
        yield bad(check, "warn", f"by hand: {found.why}")
    else:
        yield good(check, ": ".join(filter(None, (found.name, found.why))))


def _job(job: JobRequest) -> Finding:
    """Ask Slurm whether it would run a job of this config."""
    check = "a job of this config"
    try:
        script = sbatch_script(job, Path(job.output_dir) / "doctor", 1, command="call")
        start = sbatch.expected_start(script, job)
        return judged("start", not start.startswith("not now"), start, check=check)
    except UnreachableError as error:
        return unknown(check, str(error))
    except HpctrainError as error:
        return bad(check, "fail", str(error))
