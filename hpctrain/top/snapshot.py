"""What a run directory tells about a run at a moment: its progress, and its nodes and devices.

    monitor/NODE.jsonl ── the last samples ── Node ── the notes: slow, silent, idle
    progress.json, run.json ──────────────────────── Snapshot

Nothing but files of the run directory is read; no node and no scheduler is asked.
"""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpctrain.config.frozen import values_of
from hpctrain.disk import read_json
from hpctrain.errors import ConfigError
from hpctrain.runs.run_dir import RunDir
from hpctrain.tracking import samples

_HISTORY = 40  # samples of a sparkline
_TAIL = 256 * 1024  # bytes of a file of samples that are read
_RECENT = 6  # samples over which nodes are compared
_RATIO, _POINTS = 1.5, 20.0  # a node with so much more work than the others holds them up
_CLOCK = 0.9  # of the median clock; a GPU below it is slow
_BUSY = 50.0  # percent; the clock of a GPU without work says nothing
_SILENT = 3.0  # intervals without a sample
_GPU = re.compile(r"gpu_(\d+)_(.+)")
_USE = "utilization_percentage"


@dataclass
class Device:
    """A GPU, or the cores of a node.

    Attributes:
        name: `gpu 0`, or `cores`.
        now: The last values by name, without the name of the device.
        use: The use in percent in the last samples, the oldest first.
    """

    name: str
    now: dict[str, float]
    use: list[float] = field(default_factory=list)


@dataclass
class Node:
    """A node of the run.

    Attributes:
        name: Its name.
        age_s: The seconds since its last sample.
        cores: The cores of the job, and what is measured of the node.
        gpus: The GPUs of the job.
        notes: What is wrong with it, in words.
    """

    name: str
    age_s: float
    cores: Device
    gpus: list[Device]
    notes: list[str] = field(default_factory=list)


@dataclass
class Snapshot:
    """A run at a moment.

    Attributes:
        run: Its directory.
        state: What run.json says.
        progress: The content of progress.json; empty before the first step.
        nodes: The nodes of the newest attempt, those with notes first.
        slowest: The slowest rank and its node at the last report; "" if it is not known.
    """

    run: Path
    state: str
    progress: dict[str, Any]
    nodes: list[Node]
    slowest: str

    def facts(self) -> dict[str, Any]:
        """Return everything for `--json`."""
        return {
            "run": str(self.run),
            "state": self.state,
            "step": self.progress.get("step"),
            "max_steps": self.progress.get("max_steps"),
            "steps_per_s": self.progress.get("steps_per_s"),
            "metrics": self.progress.get("metrics", {}),
            "slowest": self.slowest,
            "nodes": [
                {
                    "node": node.name,
                    "age_s": round(node.age_s, 3),
                    "notes": node.notes,
                    "metrics": node.cores.now,
                    "gpus": [{"gpu": gpu.name, "metrics": gpu.now} for gpu in node.gpus],
                }
                for node in self.nodes
            ],
        }


def snapshot(run: RunDir, now: float | None = None) -> Snapshot:
    """Read a run.

    Args:
        run: The run.
        now: The time, in seconds since the epoch; None means now.

    Raises:
        StorageError: run.json is damaged.
    """
    now = time.time() if now is None else now
    record = run.read()
    attempt = (record.get("attempts") or [{}])[-1]
    state = str(record.get("state", "created"))
    progress = _progress(run.path)
    read = [_node(path, name, now) for name, path in samples.files(run.path).items()]
    begun = float(attempt.get("started") or 0.0)
    # A node of an attempt before is not a part of the run any more.
    nodes = [node for node in read if node is not None and now - node.age_s >= begun]
    _compare(nodes)
    if state == "running":
        every_s = float(_config_every(run.path) or 10.0)
        for node in nodes:
            if node.age_s > _SILENT * every_s + 5.0:
                node.notes.append(f"silent: no sample for {node.age_s:.0f} s")
    for node in nodes:
        idle = samples.folder(run.path) / f"{node.name}.idle"
        if idle.exists() and idle.stat().st_mtime >= begun:
            node.notes.append(f"idle: {idle.read_text().strip()}")
    nodes.sort(key=lambda node: (not node.notes, node.name))
    return Snapshot(run.path, state, progress, nodes, _slowest(progress, attempt))


def _progress(run: Path) -> dict[str, Any]:
    try:
        content = read_json(run / "progress.json")
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _config_every(run: Path) -> float | None:
    """Return `monitor.every_s` of the frozen config."""
    try:
        return float(values_of(run / "config.yaml")["monitor"]["every_s"])
    except (ConfigError, LookupError, TypeError, ValueError):
        return None


def _node(path: Path, name: str, now: float) -> Node | None:
    size = path.stat().st_size
    found = [s for s in samples.read(path, max(0, size - _TAIL)) if s.metrics][-_HISTORY:]
    if not found:
        return None
    last = found[-1].metrics
    numbers = sorted({int(m[1]) for m in map(_GPU.fullmatch, last) if m})
    gpus = [_gpu(number, found) for number in numbers]
    own = {key: value for key, value in last.items() if not _GPU.fullmatch(key)}
    use = [s.metrics.get(f"cpu_{_USE}", 0.0) for s in found]
    return Node(name, max(0.0, now - found[-1].time), Device("cores", own, use), gpus)


def _gpu(number: int, found: Sequence[samples.Sample]) -> Device:
    prefix = f"gpu_{number}_"
    now = {k.removeprefix(prefix): v for k, v in found[-1].metrics.items() if k.startswith(prefix)}
    use = [s.metrics[f"{prefix}{_USE}"] for s in found if f"{prefix}{_USE}" in s.metrics]
    return Device(f"gpu {number}", now, use)


def _compare(nodes: Sequence[Node]) -> None:
    """Note what makes a node slower than the others."""
    busy = [gpu for node in nodes for gpu in node.gpus if gpu.now.get(_USE, 0.0) >= _BUSY]
    clocks = [gpu.now["clock_megahertz"] for gpu in busy if "clock_megahertz" in gpu.now]
    usual = statistics.median(clocks) if clocks else 0.0
    for node in nodes:
        for gpu in node.gpus:
            clock = gpu.now.get("clock_megahertz")
            if gpu.now.get("throttled_by_heat"):
                node.notes.append(f"slow: {gpu.name} is too hot, its clock is lowered")
            elif gpu in busy and clock is not None and clock < _CLOCK * usual:
                node.notes.append(
                    f"slow: {gpu.name} has {clock:.0f} MHz, the median is {usual:.0f} MHz"
                )
            if gpu.now.get("ecc_uncorrected_errors"):
                node.notes.append(f"{gpu.name} has memory errors that could not be corrected")
        others = [_recent(other.cores) for other in nodes if other is not node]
        if others and not any(each.gpus for each in nodes):  # the host of a GPU works little
            own, usual_use = _recent(node.cores), statistics.median(others)
            if own > _RATIO * usual_use and own - usual_use > _POINTS:
                node.notes.append(
                    f"slow: its cores are busy for {own:.0f}% of the time, the others' for "
                    f"{usual_use:.0f}%, since they wait for it"
                )


def _recent(device: Device) -> float:
    return statistics.fmean(device.use[-_RECENT:]) if device.use else 0.0


def _slowest(progress: dict[str, Any], attempt: dict[str, Any]) -> str:
    """Return `rank 3 on n02`: the slowest rank at the last report."""
    rank = (progress.get("metrics") or {}).get("perf/slowest_rank")
    if rank is None:
        return ""
    hosts, ranks = attempt.get("hosts") or [], attempt.get("world_size") or 1
    place = int(rank) * len(hosts) // ranks
    return f"rank {int(rank)}" + (f" on {hosts[place]}" if place < len(hosts) else "")
