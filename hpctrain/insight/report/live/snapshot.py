"""What a run directory tells about a run at a moment: its progress, and its nodes and devices.

    monitor/NODE.jsonl ── the last sample ── Node ── the notes: slow, silent, idle
    progress.json, run.json ─────────────────────── Snapshot

Nothing but files of the run directory is read; no node and no scheduler is asked.
"""

import functools
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hpctrain.commands.facts import Facts
from hpctrain.commands.state import State, eta_s, state_of
from hpctrain.config.frozen import load
from hpctrain.runs.run_dir import RunDir
from hpctrain.tracking import samples

_TAIL = 256 * 1024  # bytes of a file of samples that are read
_SILENT = 3.0  # intervals without a sample


@dataclass
class Node:
    """A node of the run."""

    name: str
    age_s: float  # since its last sample
    metrics: dict[str, float]  # of the last sample
    notes: list[str] = field(default_factory=list)  # what is wrong with it, in words

    @property
    def gpus(self) -> dict[str, dict[str, float]]:
        """The metrics of each GPU, without its name."""
        found: dict[str, dict[str, float]] = {}
        for match in filter(None, map(samples.GPU.fullmatch, self.metrics)):
            found.setdefault(match[1], {})[match[2]] = self.metrics[match[0]]
        return found


@dataclass
class LiveSnapshot:
    """A run at a moment."""

    run: Facts
    state: State  # as far as the run directory tells it
    eta_s: float | None  # None if nothing can be forecast
    nodes: list[Node]  # of the newest attempt, those with notes first

    def facts(self) -> dict[str, Any]:
        """Return everything for `--json`."""
        progress = self.run.progress
        return {
            "run": str(self.run.path),
            "state": self.state.name,
            "reason": self.state.reason,
            "step": progress.step,
            "max_steps": progress.max_steps,
            "eta_s": self.eta_s,
            "metrics": progress.metrics,
            "nodes": [asdict(node) for node in self.nodes],
        }


def snapshot(path: Path, now: float | None = None) -> LiveSnapshot:
    """Read a run directory; `now` is in seconds since the epoch."""
    now, run = time.time() if now is None else now, Facts.read(path)
    run.held = RunDir(path).is_locked()
    state, begun = state_of(run, now), run.attempt.started
    read = [_node(path, name, now) for name, path in samples.files(path).items()]
    # A node of an attempt before is not a part of the run any more.
    nodes = [node for node in read if node is not None and now - node.age_s >= begun]
    _look_at_gpus(nodes)
    if state.name == "running":
        every_s = _config(path / "config.yaml").monitor.every_s
        for node in nodes:
            if node.age_s > _SILENT * every_s + 5.0:
                node.notes.append(f"silent: no sample for {node.age_s:.0f} s")
    idle = samples.idle(path)
    for node in nodes:
        when, text = idle.get(node.name, (0.0, ""))
        if text and when >= begun:
            node.notes.append(f"idle: {text}")
    nodes.sort(key=lambda node: (not node.notes, node.name))
    left = eta_s(run, now) if state.name == "running" else None
    return LiveSnapshot(run, state, left, nodes)


_config = functools.lru_cache(maxsize=4)(load)  # it takes as long as all the rest


def _node(path: Path, name: str, now: float) -> Node | None:
    begin = max(0, path.stat().st_size - _TAIL)
    found = [sample for sample in samples.read(path, begin) if sample.metrics]
    return Node(name, max(0.0, now - found[-1].time), dict(found[-1].metrics)) if found else None


def _look_at_gpus(nodes: Sequence[Node]) -> None:
    """Note what is wrong with the GPUs of a node."""
    for node, name, gpu in ((one, *each) for one in nodes for each in one.gpus.items()):
        if gpu.get("throttled_by_heat"):
            node.notes.append(f"slow: {name} is too hot, its clock is lowered")
        if gpu.get("ecc_uncorrected_errors"):
            node.notes.append(f"{name} has memory errors that could not be corrected")
