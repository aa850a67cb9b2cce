"""What a loop keeps in the checkpoints: the states of its own objects, as JSON and tensors.

state_dict() ── numbers, texts, lists, dicts ── JSON in the manifest of the checkpoint
             ── tensors and arrays ──────────── tensors of the checkpoint

Nothing is pickled. What has another type is refused with its place.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np
import torch
import xxhash

from hpctrain.base.errors import ConfigError
from hpctrain.data import generators
from hpctrain.engine.distributed import objects
from hpctrain.engine.part import Part

_KIND = "__kind__"  # of a value that JSON has no form for


class Kept(Part):
    """Keeps objects by name: what has a `state_dict` and a `load_state_dict`, and generators.

    A state is the same on all ranks, and that of rank 0 is saved, unless each rank has its own.

    Attributes:
        tensors: Of the last `state_dict`, by `RANK.NAME.PLACE`: those that this rank saves.
        loaded: Those of this rank in the checkpoint that was loaded, by `NAME.PLACE`.
    """

    name = "kept"

    def __init__(self, rank: int) -> None:
        self._rank, self._things = rank, dict[str, Any]()
        self._own: set[str] = set()  # the names of what each rank has for itself
        self.tensors: dict[str, torch.Tensor] = {}
        self.loaded: dict[str, torch.Tensor] = {}

    def add(self, name: str, thing: Any, *, each_rank: bool = False) -> None:
        """Keep an object; a ConfigError says what it lacks."""
        if not isinstance(thing, generators.KINDS) and not (
            callable(getattr(thing, "state_dict", None))
            and callable(getattr(thing, "load_state_dict", None))
        ):
            raise ConfigError(
                f"session.keep({name!r}): a {type(thing).__name__} has no state_dict() and "
                "load_state_dict(state); give an object that has them, or a generator of torch, "
                "NumPy or Python"
            )
        self._things[name] = thing
        if each_rank:
            self._own.add(name)

    def begin(self, step: int) -> None:
        """Look once whether ranks have what they should have alike."""
        if not step:
            self.state_dict()

    def state_dict(self) -> dict[str, Any]:
        """Return the states of all ranks, as JSON; all ranks call it together."""
        found, digests = {}, {}
        self.tensors = {}
        for name, thing in self._things.items():
            tensors: dict[str, torch.Tensor] = {}
            is_generator = isinstance(thing, generators.KINDS)
            state = generators.state_of(thing) if is_generator else thing.state_dict()
            found[name] = _encoded(state, name, tensors)
            if name in self._own or self._rank == 0:
                self.tensors |= {f"{self._rank}.{place}": t for place, t in tensors.items()}
            if name not in self._own:
                digests[name] = _digest(found[name], tensors)
        sent = {name: found[name] for name in found if self._rank == 0 or name in self._own}
        every = objects.all_gather([sent, digests])
        for rank, (_, other) in enumerate(every):
            for name, digest in other.items():
                if digest != every[0][1][name]:
                    raise ConfigError(
                        f"session.keep({name!r}): its state is another one on rank {rank} than on "
                        "rank 0, whose state a checkpoint has. If each rank has its own, give "
                        "each_rank=True; else add up over the ranks what it counts"
                    )
        return {"ranks": [own for own, _ in every]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Give each object its state; what the checkpoint does not have goes on as it is."""
        ranks = state.get("ranks", [])
        for name, thing in self._things.items():
            own = self._rank if name in self._own and self._rank < len(ranks) else 0
            if not ranks or name not in ranks[own]:
                continue
            loaded = _decoded(ranks[own][name], self.loaded)
            if isinstance(thing, generators.KINDS):
                generators.set_state(thing, loaded)
            else:
                thing.load_state_dict(loaded)

    def of_rank(self, names: Collection[str], saved: int) -> dict[str, str]:
        """Return which of `RANK.NAME.PLACE` this rank loads, by NAME.PLACE; `saved` ranks saved."""
        found = {}
        for full in names:
            rank, _, place = full.partition(".")
            own = place.partition(".")[0] in self._own and self._rank < saved
            if int(rank) == (self._rank if own else 0):
                found[place] = full
        return found


def _encoded(value: Any, place: str, tensors: dict[str, torch.Tensor]) -> Any:
    """Return a value as JSON; its tensors are put into `tensors`, by their place."""
    match value:
        case None | bool() | int() | str():
            return value
        case float():
            return value if math.isfinite(value) else {_KIND: "float", "value": repr(value)}
        case bytes():
            return {_KIND: "bytes", "value": base64.b64encode(value).decode()}
        case np.generic():
            return {
                _KIND: "scalar",
                "value": _encoded(value.item(), place, tensors),
                "dtype": value.dtype.str,
            }
        case torch.Tensor():
            tensors[place] = value.detach()
            return {_KIND: "tensor", "value": place, "device": value.device.type}
        case np.ndarray() if value.dtype.kind in "biufc":
            tensors[place] = torch.from_numpy(np.ascontiguousarray(value))
            return {_KIND: "array", "value": place}
        case list():
            return [_encoded(v, f"{place}.{n}", tensors) for n, v in enumerate(value)]
        case tuple() | set() | frozenset():
            items = sorted(value) if isinstance(value, set | frozenset) else value
            content = [_encoded(v, f"{place}.{n}", tensors) for n, v in enumerate(items)]
            return {_KIND: type(value).__name__, "value": content}
        case Mapping():
            if all(isinstance(key, str) for key in value) and _KIND not in value:
                return {key: _encoded(v, f"{place}.{key}", tensors) for key, v in value.items()}
            pairs = [
                [_encoded(key, f"{place}.{n}.key", tensors), _encoded(v, f"{place}.{n}", tensors)]
                for n, (key, v) in enumerate(value.items())
            ]
            return {_KIND: "dict", "value": pairs}
    raise ConfigError(
        f"session.keep: {place} is a {type(value).__name__}; a state has numbers, texts, bytes, "
        "tensors, arrays, lists, tuples, sets and dicts of these"
    )


def _decoded(value: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    if isinstance(value, list):
        return [_decoded(each, tensors) for each in value]
    if not isinstance(value, dict):
        return value
    if _KIND not in value:
        return {key: _decoded(each, tensors) for key, each in value.items()}
    content, made = value["value"], _MADE.get(value[_KIND])
    if made is not None:
        return made(_decoded(content, tensors))
    match value[_KIND]:
        case "dict":
            return {_decoded(k, tensors): _decoded(v, tensors) for k, v in content}
        case "scalar":
            return np.dtype(value["dtype"]).type(_decoded(content, tensors))
        case "tensor":
            return tensors[content].to(value["device"])
        case "array":
            return tensors[content].numpy()
    raise ConfigError(f"session.keep: the checkpoint has a {value[_KIND]}, which is not known here")


_MADE: dict[str, Callable[[Any], Any]] = {
    "float": float,
    "bytes": base64.b64decode,
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
}


def _digest(encoded: Any, tensors: Mapping[str, torch.Tensor]) -> str:
    found = xxhash.xxh3_128(json.dumps(encoded, sort_keys=True).encode())
    for tensor in tensors.values():
        content = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        found.update(content.numpy().tobytes())
    return found.hexdigest()
