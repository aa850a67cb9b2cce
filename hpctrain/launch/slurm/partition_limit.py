"""The time limit of a partition, beside that of a job."""

from __future__ import annotations

import functools
import re

from hpctrain.config.schema import Config
from hpctrain.launch.slurm.queue import ask


def minutes(text: str) -> float:
    """Return the minutes of a time limit as `sinfo` prints it.

    Args:
        text: `DAYS-HOURS:MINUTES:SECONDS`, of which the first parts may be missing, or "infinite".

    Raises:
        ValueError: It has another form.
    """
    if text.lower() in ("infinite", "unlimited"):
        return float("inf")
    found = re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)", text)
    if found is None:
        raise ValueError(text)
    days, hours, minute, seconds = (int(part or 0) for part in found.groups())
    return days * 1440 + hours * 60 + minute + seconds / 60


def beyond_partition(config: Config) -> str:
    """Return that a job asks for more time than its partition allows; "" if it does not.

    `sinfo` is asked once. Where it does not answer, nothing is said.

    Args:
        config: Its `launch.time_min` is a number.
    """
    limits, wanted = _limits(), config.site.partition
    names = wanted.split(",") if wanted else [n[:-1] for n in limits if n.endswith("*")]
    own = {name: limits.get(name, limits.get(f"{name}*")) for name in names}
    known = {name: limit for name, limit in own.items() if limit is not None}
    asked = config.launch.limit_min
    if not known or asked <= max(known.values()):
        return ""
    name, limit = max(known.items(), key=lambda pair: pair[1])
    return (
        f"launch.time_min={asked}: the partition {name} allows {limit:g} minutes, so Slurm refuses "
        f"the job or never starts it; use launch.time_min={limit:g} or less, or another partition"
    )


@functools.cache
def _limits() -> dict[str, float]:
    """Return the minutes by partition; the name of the default one ends with `*`."""
    listed = ask("sinfo", "--noheader", "--format=%P|%l", quiet=True) or ""
    found: dict[str, float] = {}
    for line in listed.splitlines():
        name, _, limit = line.partition("|")
        try:
            found[name] = max(found.get(name, 0.0), minutes(limit))
        except ValueError:
            continue
    return found
