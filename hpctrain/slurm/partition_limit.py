"""What a partition allows a job: its time, and to come back after a preemption."""

import functools
import re
from contextlib import suppress

from hpctrain.config.schema import LaunchConfig
from hpctrain.slurm.queue import ask, rows


def minutes(text: str) -> float:
    """Return the minutes of a time limit as `sinfo` prints it, or raise a ValueError.

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

    `sinfo` is asked once. Where it does not answer, nothing is said. `launch.time_min` must be a
    number, and no partition is the default one.
    """
    limits = _limits()
    names = partition.split(",") if partition else [n[:-1] for n in limits if n.endswith("*")]
    own = {name: limits.get(name, limits.get(f"{name}*")) for name in names}
    known = {name: limit for name, limit in own.items() if limit is not None}
    asked = launch.limit_min
    if not known or asked <= max(known.values()):
        return ""
    name, limit = max(known.items(), key=lambda pair: pair[1])
    return (
        f"launch.time_min={asked}: the partition {name} allows {limit:g} minutes, so Slurm refuses "
        f"the job or never starts it; use launch.time_min={limit:g} or less, or another partition"
    )


def not_requeued(partition: str | None) -> str:
    """Return why Slurm may not start a job again after a preemption; "" if it does.

    A job can be preempted in a partition if another one has a higher tier, or by its QOS.
    """
    settings, listed = cluster_config() or "", _partitions()
    if _value(settings, "JobRequeue") == "0":
        return (
            "this cluster starts only jobs again that ask for it (JobRequeue=0, --requeue), as "
            "those of hpctrain do; where a plugin of the site forbids it, a run that was preempted "
            "waits until `python -m hpctrain resume` goes on from its last checkpoint"
        )
    if _value(settings, "PreemptType") in ("", "(null)", "preempt/none"):
        return ""
    by_tier = "partition_prio" in _value(settings, "PreemptType")
    names = (partition or "").split(",")
    tiers = [int(_value(each, "PriorityTier") or 0) for each in listed]
    for each, tier in zip(listed, tiers, strict=True):
        is_default = _value(each, "Default") == "YES" and names == [""]
        if not (is_default or _value(each, "PartitionName") in names):
            continue
        if "CANCEL" in _value(each, "PreemptMode") and not (by_tier and tier >= max(tiers)):
            return (
                f"the partition {_value(each, 'PartitionName')} cancels jobs that are preempted "
                f"(PreemptMode=CANCEL, GraceTime={_value(each, 'GraceTime') or 0}): Slurm does not "
                "start such a run again; it waits until `python -m hpctrain resume` goes on from "
                "its last checkpoint"
            )
    return ""


@functools.cache
def cluster_config() -> str | None:
    """Return what `scontrol show config` prints; None if the controller does not answer."""
    return ask("scontrol", "show", "config", quiet=True)


@functools.cache
def _partitions() -> list[str]:
    """Return the line of each partition: `PartitionName=batch ... PreemptMode=OFF ...`."""
    listed = ask("scontrol", "--oneliner", "show", "partition", quiet=True) or ""
    return [line for line in listed.splitlines() if line.startswith("PartitionName=")]


def _value(settings: str, name: str) -> str:
    found = re.search(rf"(?:^|\s){name}\s*=\s*(\S+)", settings)
    return found[1] if found else ""


@functools.cache
def _limits() -> dict[str, float]:
    """Return the minutes by partition; the name of the default one ends with `*`."""
    listed = ask("sinfo", "--noheader", "--format=%P|%l", quiet=True) or ""
    found: dict[str, float] = {}
    for name, limit in rows(listed, (r"\S+", r"\S+")):
        with suppress(ValueError):
            found[name] = max(found.get(name, 0.0), minutes(limit))
    return found
