"""Checks of Slurm from a login node: does it answer, and would it run the jobs of this config?"""

from collections.abc import Callable, Iterator

from hpctrain.cluster.slurm import release, sbatch
from hpctrain.cluster.slurm.partition_limit import beyond_partition, road
from hpctrain.cluster.slurm.queue import UnreachableError, ask
from hpctrain.config.schema import LaunchConfig, SiteConfig
from hpctrain.errors import HpctrainError
from hpctrain.insight.doctor.finding import Finding, good, judged, unknown


def checked(
    launch: LaunchConfig, site: SiteConfig, start_of_job: Callable[[], str]
) -> Iterator[Finding]:
    """Check Slurm; `start_of_job` asks it when a job of the config would start."""
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
        found = " ".join((answer or "no answer").split())
        cure = "Wait, or tell the administrators: submissions fail until slurmctld answers."
        yield Finding("Slurm's controller", "fail", found, "is UP", cure)
        return
    up = [line.strip() for line in answer.splitlines() if " is UP" in line]
    yield good("Slurm's controller", ", ".join([release.words() or "version unknown", *up]))
    yield from _partition(launch, site)
    yield _job(start_of_job)


def _partition(launch: LaunchConfig, site: SiteConfig) -> Iterator[Finding]:
    """Check what the partition allows a job: its time, and to come back."""
    beyond = beyond_partition(launch, site.partition)
    cure = "Set launch.time_min to what is allowed, or choose another partition."
    shown = beyond or f"{launch.time_min} minutes (launch.time_min)"
    yield judged("time limit", not beyond, shown, "what the partition allows", cure, "fail")
    check, found = "after a preemption", road(site, launch.chain)
    if not found.name:
        yield unknown(check, "scontrol does not answer")
    elif found.name == "by hand":
        cure = "Set launch.chain to null or more, or choose another partition (site.partition)."
        yield Finding(check, "warn", f"by hand: {found.why}", "a requeue or a chain", cure)
    else:
        yield good(check, ": ".join(filter(None, (found.name, found.why))))


def _job(start_of_job: Callable[[], str]) -> Finding:
    """Ask Slurm whether it would run a job of this config."""
    check = "a job of this config"
    try:
        start = start_of_job()
        cure = "Ask for fewer nodes, or for another partition (launch.nodes, site.partition)."
        return judged(check, not start.startswith("not now"), start, "a start", cure)
    except UnreachableError as error:
        return unknown(check, str(error))
    except HpctrainError as error:
        return Finding(check, "fail", str(error), "accepted", "Correct the keys that are named.")
