"""What each rank knows about its collective operations, and for which ranks the others wait.

    rank 0   has entered all_reduce number 41   ── Record ──┐
    rank 1   computes, its last one is 40       ── Record ──┼── conclude ── "rank 1 did not arrive"
    rank 2   is stopped and cannot answer       nothing ────┘

torch's flight recorder counts the operations of each group. On gloo it knows which ones a rank has
entered, and which one it still waits in.
"""

from __future__ import annotations

import json
import re
import sys
import sysconfig
import threading
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.distributed import distributed_c10d

from hpctrain.errors import DamageError
from hpctrain.record import read
from hpctrain.terminal import few

_SHOWN = 8  # ranks that are named in an error
# What waits for data, and the names of the threads that read it (`hpctrain.data.loading`).
_DATA, _READER = "hpctrain.data.", "hpctrain-loader"
_KEPT = 100  # entries of the flight recorder in a record


@dataclass(frozen=True)
class Operation:
    """A collective operation, such as all_reduce; its number in its process group is from 1."""

    name: str
    group: str
    number: int
    ranks: list[int]

    def describe(self, world_size: int) -> str:
        """Return the operation in words, for a job of `world_size` ranks."""
        whole = len(self.ranks) == world_size
        ranks = "all ranks" if whole else f"ranks {few(self.ranks, _SHOWN)}"
        return f"{self.name} number {self.number} of {ranks}"


@dataclass(frozen=True)
class Record:
    """What one rank knows."""

    rank: int
    host: str
    step: int | None  # the global steps that it has made; None before the first one
    at: str  # the line of code where its main thread is, without torch's own lines
    waits_in: Operation | None  # or that has failed; None if it is in none
    entered: dict[str, int]  # the number of the last operation that it has entered, by group
    groups: dict[str, list[int]]  # the ranks of each of its groups
    stacks: list[str] = field(repr=False)  # of its threads, and of processes that make its data
    last: list[dict[str, Any]] = field(repr=False)  # entries of torch's flight recorder
    data: list[str] | None = None  # where the data is made, if its main thread waits for data

    @classmethod
    def of_this_process(
        cls,
        rank: int,
        host: str,
        step: int | None,
        error: BaseException | None = None,
        processes: Callable[[], Mapping[str, str]] = dict,
    ) -> Record:
        """Collect what this rank knows; any thread may call it.

        `error` is the exception of the operation that has failed, in the main thread. `processes`
        returns the stacks of the processes that make the data, as `faulthandler` writes them.
        """
        every = distributed_c10d._world.pg_group_ranks.items()
        groups = {str(group.group_name): list(ranks) for group, ranks in every}
        entries = _entries()
        entered = {
            name: int(entry["collective_seq_id"])
            for entry in entries
            if not entry["is_p2p"] and (name := entry["process_group"][0]) in groups
        }
        waiting = [e for e in entries if error is not None or not e["retired"]]
        frames = sys._current_frames()
        steps = _of_thread(frames[threading.main_thread().ident or 0])
        if error is not None and error.__traceback__ is not None:
            steps = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
        own = _own(steps)
        stopped = error is None and own and own[-1].f_globals.get("__name__", "").startswith(_DATA)
        others = processes() if stopped else {}
        return cls(
            rank,
            host,
            step,
            _place(steps) or "an unknown place",
            _operation(waiting[-1], groups) if waiting else None,
            entered,
            groups,
            [*_stacks(frames, error), *(f"{name}:\n{text}" for name, text in others.items())],
            entries[-_KEPT:],
            _makers(frames, others) if stopped else None,
        )

    @classmethod
    def read(cls, file: Path) -> Record | None:
        """Return what `write` has written; None if the file does not exist or is damaged."""
        try:
            return read(cls, file, parts=2)
        except (FileNotFoundError, DamageError):
            return None

    def text(self) -> str:
        """Return the record as JSON."""
        return json.dumps(asdict(self), indent=1) + "\n"


def conclude(records: Mapping[int, Record], hosts: Mapping[int, str], own: int) -> str:
    """Return which ranks did not arrive, where the others wait for them, and what they do.

    The rank `own` concludes, from its record and those of the ranks that have answered. `hosts` has
    the node of each rank, or "".
    """
    silent = [rank for rank in hosts if rank not in records]
    behind = [rank for rank in records if _is_behind(rank, records)]
    # A rank that waits itself is late because of another one.
    late = sorted({*silent, *(rank for rank in behind if records[rank].waits_in is None)})
    late = late or sorted(behind)
    told = [records[own], *records.values()]
    operations = [record.waits_in for record in told if record.waits_in is not None]
    operation = next((op for op in operations if {*late} & {*op.ranks}), None)
    operation = operation or next(iter(operations), None)
    where = operation.describe(len(hosts)) if operation else "a collective operation"
    step = records[own].step
    when = "before the first step" if step is None else f"after step {step}"
    if not late:
        return f"{when}: all ranks have entered {where}, but not all have got its result"
    waiting = len(records.keys() - {*late})
    verb = "ranks wait" if waiting > 1 else "rank waits"
    text = f"{when}: {_with_hosts(late, hosts)} did not arrive at {where}; {waiting} {verb} for it"
    for rank in late[:_SHOWN]:
        if rank in silent:
            text += f"; rank {rank} does not answer"
        elif (waits_in := records[rank].waits_in) is not None:
            text += f"; rank {rank} waits in {waits_in.describe(len(hosts))}"
        elif (makers := records[rank].data) is not None:
            text += "; ".join([f"; rank {rank} waits for data at {records[rank].at}", *makers])
        else:
            text += f"; rank {rank} is at {records[rank].at}"
    return text


def _is_behind(rank: int, records: Mapping[int, Record]) -> bool:
    """Return whether another rank has entered more operations of one of the rank's groups."""
    own = records[rank]
    return any(
        own.entered.get(name, 0) < other.entered.get(name, 0)
        for name, ranks in own.groups.items()
        for other in records.values()
        if other.groups.get(name) == ranks  # groups of other ranks may have the same name
    )


def _entries() -> list[dict[str, Any]]:
    """Return the entries of the flight recorder, in their order; none where it is switched off."""
    try:
        dump = torch._C._distributed_c10d._dump_fr_trace_json()  # type: ignore[attr-defined]
        trace = json.loads(dump)
    except (AttributeError, RuntimeError, ValueError):
        return []
    return sorted(trace.get("entries", []), key=lambda entry: int(entry["record_id"]))


def _operation(entry: dict[str, Any], groups: dict[str, list[int]]) -> Operation:
    group = entry["process_group"][0]
    number = entry["p2p_seq_id"] if entry["is_p2p"] else entry["collective_seq_id"]
    name = entry["profiling_name"].partition(":")[2]
    return Operation(name, group, int(number), groups.get(group, []))


def _of_thread(frame: FrameType) -> list[FrameType]:
    return [each for each, _ in traceback.walk_stack(frame)][::-1]


def _own(frames: list[FrameType]) -> list[FrameType]:
    return [each for each in frames if not _is_of_python_or_torch(each.f_code.co_filename)]


def _place(frames: list[FrameType]) -> str:
    """Return the innermost frame of the user's code, or of a library other than torch; or ""."""
    if not (own := _own(frames)):
        return ""
    code = own[-1].f_code
    return f"{code.co_filename}:{own[-1].f_lineno} in {code.co_name}"


def place_of_main_thread() -> str:
    """Return where the main thread of this process is, in the user's code or a library; or ""."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return "" if frame is None else _place(_of_thread(frame))


def _makers(frames: Mapping[int, FrameType], processes: Mapping[str, str]) -> list[str]:
    """Return where the processes are that make the data, or else the threads that read it."""
    found = []
    for name, text in processes.items():
        lines = re.findall(r'File "(.*)", line (\d+) in (.*)', text.partition("Current thread")[2])
        places = [f"is at {f}:{n} in {c}" for f, n, c in lines if not _is_of_python_or_torch(f)]
        found.append(f"{name} {next(iter(places), 'does not answer')}")
    readers = [t for t in threading.enumerate() if t.name.startswith(_READER) and t.ident in frames]
    places = [_place(_of_thread(frames[thread.ident or 0])) for thread in readers]
    return found or [f"a thread that reads is at {place}" for place in places if place]


def _is_of_python_or_torch(file: str) -> bool:
    if file.startswith((str(Path(torch.__file__).parent), "<frozen")):
        return True
    return file.startswith(sysconfig.get_path("stdlib")) and "site-packages" not in file


def _stacks(frames: Mapping[int, FrameType], error: BaseException | None) -> list[str]:
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    stacks = [
        f"{names.get(number, number)}:\n{''.join(traceback.format_stack(frame))}"
        for number, frame in frames.items()
    ]
    return [*([] if error is None else ["".join(traceback.format_exception(error))]), *stacks]


def _with_hosts(ranks: list[int], hosts: Mapping[int, str]) -> str:
    named = [f"{rank} ({hosts[rank]})" if hosts[rank] else str(rank) for rank in ranks]
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {few(named, _SHOWN)}"
