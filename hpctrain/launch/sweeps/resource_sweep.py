"""Runs of a sweep over resources, `launch.nodes=1,2,4`: each gets a directory of its own.

Resources do not decide the result, so these runs would have one name, and only the first would run.
Here the values are added to the name: `digits-nodes2-3fa92c1b`.
"""

from __future__ import annotations

import os
import re
from typing import Any

from hpctrain.config.frozen import plain
from hpctrain.config.schema import LaunchConfig, SiteConfig
from hpctrain.launch.arrays import Entry
from hpctrain.launch.output import runs, say
from hpctrain.runs.run_dir import RunDir

_RESOURCES = ("nodes", "tasks_per_node", "gpus_per_node", "cpus_per_task", "mem_gb")


def name_apart(entries: list[Entry]) -> None:
    """Rename the runs that differ only in their resources, and say so."""
    groups: dict[str, list[Entry]] = {}
    for entry in entries:
        groups.setdefault(os.path.realpath(entry.run.path), []).append(entry)
    renamed, keys = 0, set()
    for group in groups.values():
        resources = [_resources(entry.config.launch, entry.config.site) for entry in group]
        swept = [key for key in resources[0] if len({repr(own[key]) for own in resources}) > 1]
        for entry, own in zip(group if swept else [], resources, strict=False):
            values = "".join(f"-{key.rpartition('.')[2]}{own[key]}" for key in swept)
            entry.config.name = re.sub(r"[^\w.-]+", "-", entry.config.name + values)[:64]
            entry.run = RunDir.of(entry.config, entry.run.data_digest)
            renamed += 1
        keys |= {*swept}
    if renamed:
        say(
            f"{runs(renamed)} differ only in {', '.join(sorted(keys))}, which does not change the "
            "result: their names have the values"
        )


def _resources(launch: LaunchConfig, site: SiteConfig) -> dict[str, Any]:
    own = {f"launch.{key}": getattr(launch, key) for key in _RESOURCES}
    return own | {f"site.{key}": value for key, value in plain(site).items()}
