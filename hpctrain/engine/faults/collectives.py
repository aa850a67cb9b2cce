"""What a rank knows of where it waits: a collective operation, or the makers of its data.

torch's flight recorder counts the operations of each group. On gloo it knows which ones a rank has
entered, and which one it still waits in.
"""

import json
import logging
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.distributed import distributed_c10d

from hpctrain.base.processes import frames
from hpctrain.base.terminal.terminal import few
from hpctrain.engine.distributed import long_work

log = logging.getLogger(__name__)
_SHOWN = 8  # ranks that are named
# What waits for data, and the names of the threads that read it (`hpctrain.data.loading`).
_DATA, _READER = "hpctrain.data.", "hpctrain-loader"


def where(world_size: int, processes: Callable[[], Mapping[str, str]] = dict) -> dict[str, Any]:
    """Return where this rank waits, of `world_size`; any thread may call it.

    `waits_in` is a collective operation in words, or "", and `entered` the number of those that it
    has entered. `data` are the places where the data is made that the main thread waits for, if it
    does. `processes` returns the stacks of the processes that make it, as `faulthandler` writes
    them.
    """
    groups = {
        str(group.group_name): list(ranks)
        for group, ranks in distributed_c10d._world.pg_group_ranks.items()
        if not isinstance(group, int)  # torch's word for the groups that this rank is not in
    }
    entries = _entries()
    waiting = [entry for entry in entries if not entry["retired"]]
    entered = {
        name: int(entry["collective_seq_id"])
        for entry in entries
        if not entry["is_p2p"] and (name := entry["process_group"][0]) in groups
    }
    inner = [each.f_globals.get("__name__", "") for each in frames.own(frames.of_main_thread())]
    without_data = inner and inner[-1].startswith(_DATA)
    waits_in = _words(waiting[-1], groups, world_size)[:200] if waiting else long_work.waits_for
    return {
        "waits_in": waits_in,
        "entered": sum(entered.values()),
        "data": [maker[:500] for maker in _makers(processes())[:4]] if without_data else [],
    }


def _entries() -> list[dict[str, Any]]:
    """Return the entries of the flight recorder, in their order; none where it is switched off."""
    try:
        dump = torch._C._distributed_c10d._dump_fr_trace_json()  # type: ignore[attr-defined]
        trace = json.loads(dump)
    except (AttributeError, RuntimeError, ValueError):
        return []
    return sorted(trace.get("entries", []), key=lambda entry: int(entry["record_id"]))


def _words(entry: dict[str, Any], groups: dict[str, list[int]], world_size: int) -> str:
    """Return an operation such as `all_reduce number 29 of all ranks`."""
    number = entry["p2p_seq_id"] if entry["is_p2p"] else entry["collective_seq_id"]
    ranks = groups.get(entry["process_group"][0], [])
    whole = len(ranks) == world_size
    whose = "all ranks" if whole else f"ranks {few(ranks, _SHOWN)}"
    return f"{entry['profiling_name'].partition(':')[2]} number {number} of {whose}"


def _makers(processes: Mapping[str, str]) -> list[str]:
    """Return where the processes are that make the data, or else the threads that read it."""
    found = []
    for name, text in processes.items():
        at = frames.place_in(text)
        found.append(f"{name} {f'is at {at}' if at else 'does not answer'}")
    threads = sys._current_frames()
    readers = [t.ident or 0 for t in threading.enumerate() if t.name.startswith(_READER)]
    places = [frames.place(frames.of_thread(threads[i])) for i in readers if i in threads]
    return found or [f"a thread that reads is at {place}" for place in places if place]
