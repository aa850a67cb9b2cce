"""The file of a node's samples: `monitor/NODE.jsonl` in the run directory, one line a sample.

    {"number": 0, "time": 1.7e9, "facts": {"driver": "570.1", "gpu_0": "NVIDIA H100", ...}}
    {"number": 1, "time": 1.7e9, "metrics": {"gpu_0_utilization_percentage": 93.0, ...}}

Only the monitor of that node writes it, with one write a line. The numbers go on in later attempts.
"""

import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from hpctrain.base.errors import DamageError
from hpctrain.base.files import record
from hpctrain.base.files.disk import open_below, open_regular
from hpctrain.base.files.record import Count, Record, Time, decode

IDLE_PERCENT = 5.0  # of a device that is used less in a sample
_TAIL = 64 * 1024  # bytes; a line is far shorter
# The metric of a GPU: `gpu_0`, and the name of the sensor.
GPU = re.compile(r"(gpu_\d+)_(.+)")
_NODE = re.compile(r"([\w.-]{1,255})\.jsonl")  # the node becomes a part of a metric's name


class Sample(NamedTuple):
    """One line of the file."""

    end: int  # the position in the file after the line, in bytes
    number: int  # the number of the sample, from 0, over all attempts
    time: float  # when it was taken, in seconds since the epoch
    metrics: dict[str, float]  # the values by name; empty for a line of facts
    facts: Mapping[str, str] = {}  # what a line of facts says; empty for other lines


class _Line(Record, frozen=True):
    number: Count
    time: Time
    metrics: dict[str, float] = msgspec.field(default_factory=dict)
    facts: dict[str, str] = msgspec.field(default_factory=dict)


def folder(run_dir: Path) -> Path:
    """Return the folder of the samples in a run directory."""
    return run_dir / "monitor"


def files(run_dir: Path) -> dict[str, Path]:
    """Return the files of all nodes by the name of the node, in its order."""
    with suppress(OSError):
        names = sorted(os.listdir(folder(run_dir)))  # not `glob`: a report looks into many runs
        return {m[1]: folder(run_dir) / m[0] for m in map(_NODE.fullmatch, names) if m}
    return {}


def idle(run_dir: Path) -> dict[str, tuple[float, str]]:
    """Return by node what its monitor has said of idle devices, and when."""
    found = {}
    for path in sorted(folder(run_dir).glob("*.idle")):
        with suppress(OSError), open_regular(path, parts=2) as file:
            when = os.fstat(file.fileno()).st_mtime
            found[path.stem] = when, file.read(4096).decode(errors="replace").strip()
    return found


class SampleWriter:
    """Appends the samples of one node. An incomplete last line, of a killed process, is ended."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._fd = open_below(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 2, 0o644)
        size = os.fstat(self._fd).st_size
        if size and os.pread(self._fd, 1, size - 1) != b"\n":
            os.write(self._fd, b"\n")
        before = [*read(path, max(0, size - _TAIL))]
        self._next = before[-1].number + 1 if before else 0
        self.last = next((s.metrics for s in reversed(before) if s.metrics), {})

    def write(self, time: float, **content: Mapping[str, Any]) -> None:
        """Append `metrics` or `facts`. An OSError loses this sample; the next may be written."""
        body = {"number": self._next, "time": round(time, 3), **content}
        os.write(self._fd, json.dumps(body, separators=(",", ":")).encode() + b"\n")
        self._next += 1

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)


def read(path: Path, begin: int = 0) -> Iterator[Sample]:
    """Yield the samples after a byte; what is no sample, a torn line also, is left out."""
    try:
        file = open_regular(path, parts=2)
    except OSError:
        return
    with file:
        file.seek(max(0, begin - 1))
        lines, end = record.lines(file, path), max(0, begin - 1)
        if begin:
            end += next(lines, (b"", 0))[1]
        for line, size in lines:
            if not line.endswith(b"\n"):
                return
            end += size
            with suppress(DamageError):
                body = decode(_Line, line, "")
                finite = {key: value for key, value in body.metrics.items() if math.isfinite(value)}
                yield Sample(end, body.number, body.time, finite, body.facts)


def last_time(run_dir: Path) -> float:
    """Return when a node has taken its last sample, in seconds since the epoch; 0 without one."""
    last = 0.0
    for path in files(run_dir).values():
        for sample in read(path, max(0, path.stat().st_size - _TAIL)):
            last = max(last, sample.time)
    return last


def new(run_dir: Path, positions: Mapping[str, int]) -> Iterator[tuple[str, Sample]]:
    """Yield the samples of all nodes, each with its node, after their positions in the files."""
    for node, path in files(run_dir).items():
        for sample in read(path, positions.get(node, 0)):
            yield node, sample
