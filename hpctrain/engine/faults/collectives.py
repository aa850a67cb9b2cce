"""What a rank knows of where it waits: a collective operation, or the makers of its data.

torch's flight recorder counts the operations of each group. It knows which ones a rank has entered,
and which ones it still waits in. NCCL and gloo count by themselves, also in one group. Up to torch
2.13 they have a recorder each; later, both functions return all that there is.
"""

import json
import logging
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from itertools import chain
from typing import Any

import torch
from torch.distributed import distributed_c10d

from hpctrain.base.processes import frames
from hpctrain.base.terminal.terminal import few
from hpctrain.engine.distributed import long_work

log = logging.getLogger(__name__)
_SHOWN, _GROUPS = 8, 32  # ranks that are named, and groups that are told
# What waits for data, and the names of the threads that read it (`hpctrain.data.loading`).
_DATA, _READER = "hpctrain.data.", "hpctrain-loader"


def where(world_size: int, processes: Callable[[], Mapping[str, str]] = dict) -> dict[str, Any]:
    """Return where this rank waits, of `world_size`; any thread may call it.

    `waits_in` is the first collective operation that has not ended, in words, or "". `open` are the
    groups of all of them, such as "nccl:0", and `entered` has the number of the last one that the
    rank has entered, by group. `data` are the places where the data is made that the main thread
    waits for, if it does. `processes` returns the stacks of the processes that make it, as
    `faulthandler` writes them. `recorded` is what NCCL's recorder has, or else that of gloo.
    """
    groups = {
        str(group.group_name): list(ranks)
        for group, ranks in distributed_c10d._world.pg_group_ranks.items()
        if not isinstance(group, int)  # torch's word for the groups that this rank is not in
    }
    recorders = _recorders()
    entries = [each for each in _entries(recorders) if each["process_group"][0] in groups]
    backends, waiting = dict.fromkeys(map(_backend, entries)), list[dict[str, Any]]()
    entered = {f"{backend}:{name}": 0 for name in groups for backend in backends}
    for entry in entries:
        if not entry["is_p2p"]:
            before = entered.pop(_group(entry))  # the last of them are the newest
            entered[_group(entry)] = int(entry["collective_seq_id"])
            if entered[_group(entry)] < before:  # it was of an older group of that name
                waiting = [each for each in waiting if _group(each) != _group(entry)]
        # What the watchdog of NCCL has not seen yet may have ended as well.
        if not (entry["retired"] or entry["state"] == "completed"):
            waiting.append(entry)
    inner = [each.f_globals.get("__name__", "") for each in frames.own(frames.of_main_thread())]
    without_data = inner and inner[-1].startswith(_DATA)
    waits_in = _words(waiting[0], groups, world_size)[:200] if waiting else long_work.waits_for
    return {
        "waits_in": waits_in,
        "open": sorted({_group(each) for each in waiting if not each["is_p2p"]})[:_GROUPS],
        "entered": dict([*entered.items()][-_GROUPS:]),
        "data": [maker[:500] for maker in _makers(processes())[:4]] if without_data else [],
        "recorded": recorders[-1] if entries else {},
    }


def _recorders() -> list[dict[str, Any]]:
    """Return what each flight recorder has, if it has something; that of NCCL comes last."""
    found = []
    for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json"):
        with suppress(AttributeError, RuntimeError, ValueError):  # there is none, or it is off
            found.append(json.loads(getattr(torch._C._distributed_c10d, name)()))
    return [trace for trace in found if trace.get("entries")]


def _entries(recorders: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the entries of all recorders, each once, in their order."""
    every = chain.from_iterable(trace["entries"] for trace in recorders)
    once = {(_backend(entry), entry["record_id"]): entry for entry in every}
    return sorted(once.values(), key=lambda entry: int(entry["time_created_ns"]))


def _backend(entry: dict[str, Any]) -> str:
    return str(entry["profiling_name"]).partition(":")[0]


def _group(entry: dict[str, Any]) -> str:
    return f"{_backend(entry)}:{entry['process_group'][0]}"


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
