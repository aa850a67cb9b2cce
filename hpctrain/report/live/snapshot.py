"""What a run directory tells about a run at a moment: its progress, and its nodes and devices.

    monitor/NODE.jsonl ── the last samples ── Node ── the notes: slow, silent, idle
    progress.json, run.json ──────────────────────── Snapshot

Nothing but files of the run directory is read; no node and no scheduler is asked.
"""

import functools
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from msgspec import structs

from hpctrain.config.frozen import load
from hpctrain.run_record import Hang, Progress
from hpctrain.runs.run_dir import RunDir
from hpctrain.slow import BUSY_PERCENT, GPU_CLOCK
from hpctrain.tracking import samples

_HISTORY = 40  # samples of a sparkline
_TAIL = 256 * 1024  # bytes of a file of samples that are read
_SILENT = 3.0  # intervals without a sample
_ALIVE_S = 60.0  # a run writes its progress more often
_USE = "utilization_percentage"


@dataclass
class Device:
    """A GPU, or the cores of a node."""

    name: str  # `gpu 0`, or `cores`
    now: dict[str, float]  # by name, without that of the device
    use: list[float] = field(default_factory=list)  # percent, the oldest first


@dataclass
class Node:
    """A node of the run."""

    name: str
    age_s: float  # since its last sample
    cores: Device  # those of the job, and what is measured of the node
    gpus: list[Device]
    notes: list[str] = field(default_factory=list)  # what is wrong with it, in words


@dataclass
class Snapshot:
    """A run at a moment."""

    run: Path
    state: str  # of run.json; "lost" if the run shows no sign of life
    progress: Progress  # empty before the first step
    nodes: list[Node]  # of the newest attempt, those with notes first
    notes: list[str] = field(default_factory=list)  # what looks wrong with the run, in words

    def facts(self) -> dict[str, Any]:
        """Return everything for `--json`."""
        return {
            "run": str(self.run),
            "state": self.state,
            "step": self.progress.step,
            "max_steps": self.progress.max_steps,
            "steps_per_s": self.progress.steps_per_s,
            "metrics": self.progress.metrics,
            "notes": self.notes,
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
    """Read a run; `now` is in seconds since the epoch. A damaged run.json is a StorageError."""
    now = time.time() if now is None else now
    record = run.read()
    attempt, state = record.attempt, record.state or "created"
    progress = Progress.of(run.path)
    read = [_node(path, name, now) for name, path in samples.files(run.path).items()]
    begun = attempt.started
    # A node of an attempt before is not a part of the run any more.
    nodes = [node for node in read if node is not None and now - node.age_s >= begun]
    _compare(nodes)
    if state == "running":
        every_s = _config(run.config_file).monitor.every_s
        for node in nodes:
            if node.age_s > _SILENT * every_s + 5.0:
                node.notes.append(f"silent: no sample for {node.age_s:.0f} s")
    idle = samples.idle(run.path)
    for node in nodes:
        when, text = idle.get(node.name, (0.0, ""))
        if text and when >= begun:
            node.notes.append(f"idle: {text}")
    nodes.sort(key=lambda node: (not node.notes, node.name))
    hang = Hang.of(run.path, attempt.key, begun) if state == "running" else None
    notes = [*([hang.sentence] if hang else []), *record.noted()]
    age_s = now - progress.time
    if state == "running" and begun <= progress.time and age_s > _ALIVE_S:
        # As `status` says, unless the scheduler knows more.
        state = state if run.is_locked() else "lost"
        notes = [f"no sign of life for {age_s:.0f} s: `status` says what became of it", *notes]
        progress = structs.replace(progress, steps_per_s=None)  # nothing is forecast
    return Snapshot(run.path, state, progress, nodes, notes)


_config = functools.lru_cache(maxsize=4)(load)  # it takes as long as all the rest


def _node(path: Path, name: str, now: float) -> Node | None:
    size = path.stat().st_size
    found = [s for s in samples.read(path, max(0, size - _TAIL)) if s.metrics][-_HISTORY:]
    if not found:
        return None
    last = found[-1].metrics
    numbers = sorted({int(m[1][4:]) for m in map(samples.GPU.fullmatch, last) if m})
    gpus = [_gpu(number, found) for number in numbers]
    own = {key: value for key, value in last.items() if not samples.GPU.fullmatch(key)}
    use = [s.metrics.get(f"cpu_{_USE}", 0.0) for s in found]
    return Node(name, max(0.0, now - found[-1].time), Device("cores", own, use), gpus)


def _gpu(number: int, found: Sequence[samples.Sample]) -> Device:
    prefix = f"gpu_{number}_"
    now = {k.removeprefix(prefix): v for k, v in found[-1].metrics.items() if k.startswith(prefix)}
    use = [s.metrics[f"{prefix}{_USE}"] for s in found if f"{prefix}{_USE}" in s.metrics]
    return Device(f"gpu {number}", now, use)


def _compare(nodes: Sequence[Node]) -> None:
    """Note what makes a node slower than the others."""
    busy = [gpu for node in nodes for gpu in node.gpus if gpu.now.get(_USE, 0.0) >= BUSY_PERCENT]
    clocks = [gpu.now["clock_megahertz"] for gpu in busy if "clock_megahertz" in gpu.now]
    usual = statistics.median(clocks) if clocks else 0.0
    for node in nodes:
        for gpu in node.gpus:
            clock = gpu.now.get("clock_megahertz")
            if gpu.now.get("throttled_by_heat"):
                node.notes.append(f"slow: {gpu.name} is too hot, its clock is lowered")
            elif gpu in busy and clock is not None and clock < GPU_CLOCK * usual:
                node.notes.append(
                    f"slow: {gpu.name} has {clock:.0f} MHz, the median is {usual:.0f} MHz"
                )
            if gpu.now.get("ecc_uncorrected_errors"):
                node.notes.append(f"{gpu.name} has memory errors that could not be corrected")
