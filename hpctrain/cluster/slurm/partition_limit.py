"""What a partition allows a job: its time, and to come back after a preemption."""

import functools
import re
from contextlib import suppress
from typing import NamedTuple

from hpctrain.cluster.slurm.queue import ask
from hpctrain.config.schema import LaunchConfig, SiteConfig


def minutes(text: str) -> float:
    """Return the minutes of a time limit as Slurm prints it, or raise a ValueError.

    It is `DAYS-HOURS:MINUTES:SECONDS`, of which the first parts may be missing, or "infinite".
    """
    if text.lower() in ("infinite", "unlimited"):
        return float("inf")
    found = re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)", text)
    if found is None:
        raise ValueError(text)
    days, hours, minute, seconds = (int(part or 0) for part in found.groups())
    return days * 1440 + hours * 60 + minute + seconds / 60


def beyond_partition(launch: LaunchConfig, partition: str | None) -> str:
    """Return that a job asks for more time than its partition allows; "" if it does not.

    Slurm is asked once. Where it does not answer, nothing is said. `launch.time_min` must be a
    number, and no partition is the default one.
    """
    asked, limits = launch.time_min, dict[str, float]()
    for line in _lines_of(partition):
        with suppress(ValueError):
            limits[value_of(line, "PartitionName")] = minutes(value_of(line, "MaxTime"))
    name, limit = max(limits.items(), key=lambda pair: pair[1], default=("", asked))
    if asked <= limit:
        return ""
    return (
        f"launch.time_min={asked}: the partition {name} allows {limit:g} minutes, so Slurm refuses "
        f"the job or never starts it; use launch.time_min={limit:g} or less, or another partition"
    )


class Road(NamedTuple):
    """How a run comes back after a preemption.

    `name` is "requeue"; "chain": the next of so many `jobs` goes on; or "by hand": it waits for
    `python -m hpctrain resume`. Within `grace_s` seconds a job must requeue itself, if not None.
    """

    name: str
    why: str = ""
    jobs: int = 1
    grace_s: int | None = None


def road(site: SiteConfig, chain: int | None) -> Road:
    """Return the road of one or several partitions; its name is "" if Slurm does not answer.

    A job can be preempted in a partition if another one has a higher tier, or by its QOS, which
    then says how. `chain` is `launch.chain`, and no partition is the default one.
    """
    if (settings := cluster_config()) is None:
        return Road("", jobs=chain or 1)
    lines = _lines_of(site.partition)
    found = [_of_partition(line, settings, chain, site.qos) for line in lines]
    # Slurm may choose any of the partitions.
    worst = max(found, key=lambda each: each.name != "requeue", default=Road("requeue"))
    if worst.name == "requeue" and chain and chain > 1:
        worst = worst._replace(name="chain", why=f"launch.chain={chain} asks for it", jobs=chain)
    if value_of(settings, "JobRequeue") == "0":
        why = f"{worst.why}; JobRequeue=0 is healed by Requeue=1 at each requeue".lstrip("; ")
        return worst._replace(why=why)
    return worst


_LINKS = 3  # jobs of a chain where launch.chain is null


def _of_partition(line: str, settings: str, chain: int | None, qos: str | None) -> Road:
    name, mode = f"partition {value_of(line, 'PartitionName')}", value_of(line, "PreemptMode")
    kind, grace_s = value_of(settings, "PreemptType"), int(value_of(line, "GraceTime") or 0)
    if qos and "qos" in kind:
        command = ("sacctmgr", "--noheader", "--parsable2", "show", "qos", qos)
        said = ask(*command, "format=PreemptMode,GraceTime", quiet=True) or ""
        own = re.search(r"^(\w*)\|([\d:-]+)\|?$", said, re.MULTILINE)
        grace_s, mode = round(60 * minutes(own[2])) if own else 0, own[1].upper() if own else ""
        name, mode = f"QOS {qos}", mode.replace("CLUSTER", "") or value_of(settings, "PreemptMode")
    tier, *tiers = (int(value_of(each, "PriorityTier") or 0) for each in (line, *partition_lines()))
    highest = "partition_prio" in kind and tier >= max(tiers)
    if kind in ("", "(null)", "preempt/none") or mode == "OFF" or highest:
        return Road("requeue", f"Slurm preempts no job of the {name}")
    if "CANCEL" not in mode:
        what = "suspends a preempted job" if "SUSPEND" in mode else "starts a preempted job again"
        return Road("requeue", f"Slurm {what} ({name}, PreemptMode={mode})")
    how = f"(PreemptMode=CANCEL, GraceTime={grace_s})"
    if grace_s:
        why = f"a job that the {name} preempts requeues itself before it is cancelled"
        return Road("requeue", f"{why} {how}", grace_s=grace_s)
    why = f"the {name} cancels jobs that are preempted at once {how}"
    if (jobs := chain or _LINKS) == 1:
        why += "; with launch.chain=1 a run waits until `python -m hpctrain resume` goes on"
        return Road("by hand", why)
    why += f": {jobs} jobs are queued for each run, one after another (launch.chain)"
    return Road("chain", why, jobs)


@functools.cache
def cluster_config() -> str | None:
    """Return what `scontrol show config` prints; None if the controller does not answer."""
    return ask("scontrol", "show", "config", quiet=True)


@functools.cache
def partition_lines() -> list[str]:
    """Return the line of each partition: `PartitionName=batch ... PreemptMode=OFF ...`."""
    listed = ask("scontrol", "--oneliner", "show", "partition", quiet=True) or ""
    return [line for line in listed.splitlines() if line.startswith("PartitionName=")]


def _lines_of(partition: str | None) -> list[str]:
    named = ("PartitionName", partition.split(",")) if partition else ("Default", ["YES"])
    return [line for line in partition_lines() if value_of(line, named[0]) in named[1]]


def value_of(settings: str, name: str) -> str:
    """Return a value in what `scontrol show` prints; "" if it is not there."""
    found = re.search(rf"(?:^|\s){name}\s*=\s*(\S+)", settings)
    return found[1] if found else ""
