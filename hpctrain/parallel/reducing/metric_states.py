"""The states of metrics, merged over the ranks, and the values that follow from them.

    rank 0   states ──┐
    rank 1   states ──┼── one rank ── merged by each state's own reduction ── compute ── all ranks
    rank 2   (none) ──┘

A metric of torchmetrics declares its states and how they are merged (`add_state`,
`dist_reduce_fx`): sums are added, lists of samples are joined, and so on. Its own synchronisation
gathers over all ranks. That would count the samples of ranks that divide a layer several times,
and it would wait for ever for a rank without samples. So the states are gathered here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist

from hpctrain.distributed import objects
from hpctrain.distributed.tensors import dtype_name
from hpctrain.errors import ConfigError
from hpctrain.parallel.mesh import Mesh
from hpctrain.tasks import Task, measuring
from hpctrain.tasks.outputs import described

_States = list[dict[str, Any]]  # of a metric and of the metrics inside it, in their order


class Measured:
    """One evaluation by the `metrics` of a task, in which its `task` stands for the task itself.

    Without metrics it does nothing.
    """

    def __init__(self, task: Task, mesh: Mesh) -> None:
        self._measuring, self._mesh = measuring(task, mesh.device), mesh
        self.task: Task = self._measuring or task
        if self._measuring is not None:
            self._measuring.begin()

    def update(self) -> None:
        """Update the metrics after a batch was evaluated."""
        if self._measuring is not None:
            self._measuring.update(self._mesh.is_counted)

    def values(self) -> dict[str, float]:
        """Return the metrics over the samples of all ranks, the same on all of them."""
        if self._measuring is None:
            return {}
        return computed(self._measuring.metrics, self._mesh.device)


def computed(metrics: Mapping[str, Any], device: torch.device) -> dict[str, float]:
    """Return the value of each metric over the samples of all ranks, the same on all ranks.

    All ranks of the default group call this. A metric that no rank has updated has no value. Each
    rank's metrics have its own states afterwards, as before.
    """
    updated = [_is_updated(metric) for metric in metrics.values()]
    states = [_states(m) if u else [] for m, u in zip(metrics.values(), updated, strict=True)]
    # A rank that has samples computes: torchmetrics warns on a rank that has none.
    ranks = [rank for rank, one in enumerate(objects.all_gather(any(updated))) if one]
    if not ranks:
        return {}
    gathered = _gather(states, ranks[0], device)
    values: dict[str, float | str] = {}
    if dist.get_rank() == ranks[0]:
        for number, (name, metric) in enumerate(metrics.items()):
            if found := [states[number] for states in gathered if states[number]]:
                values[name] = _value(metric, found)
    values = objects.broadcast(values, ranks[0])
    for name, value in values.items():
        if isinstance(value, str):
            raise ConfigError(
                f"task.metrics.{name} is {value}; a metric is one number: choose an average "
                "(average: macro), or give each part its own metric"
            )
    return {name: float(value) for name, value in values.items()}


def _value(metric: Any, found: list[_States]) -> float | str:
    """Return the value of a metric for the states of several ranks; see `_number`.

    It has its own states afterwards. A list that was merged is a tensor, which the metric could not
    empty for its next use.
    """
    own = _states(metric)
    _merge(metric, found)
    try:
        return _number(metric.compute())
    finally:
        _set(metric, own)


def _number(value: Any) -> float | str:
    """Return the value of a metric, or what it is if it is not one number."""
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return float(value)
    if isinstance(value, int | float):
        return float(value)
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return f"a dict of {', '.join(map(str, value))}" if isinstance(value, dict) else repr(value)


def _parts(metric: Any) -> Iterator[Any]:
    """Yield a metric and the metrics inside it, such as those of a wrapper."""
    yield from (module for module in metric.modules() if hasattr(module, "_reductions"))


def _is_updated(metric: Any) -> bool:
    """Return whether a metric has had samples; without states it keeps its count at a reset."""
    return any(part._update_count for part in _parts(metric) if part._reductions)


def _states(metric: Any) -> _States:
    return [{name: getattr(part, name) for name in part._reductions} for part in _parts(metric)]


def _set(metric: Any, states: _States) -> None:
    for part, values in zip(_parts(metric), states, strict=True):
        for name, value in values.items():
            setattr(part, name, value)


def _merge(metric: Any, found: list[_States]) -> None:
    """Give a metric the states of several ranks, as torchmetrics itself does."""
    if len(found) == 1:
        merged = found[0]
    else:
        merged = [
            {name: _reduced(each[name], [ranks[n][name] for ranks in found]) for name in each}
            for n, each in enumerate([part._reductions for part in _parts(metric)])
        ]
    _set(metric, merged)


def _reduced(reduction: Any, values: list[Any]) -> Any:
    if isinstance(values[0], list):
        joined = [each for value in values for each in value]
        return reduction(joined) if joined and reduction is not None else joined
    stacked = torch.stack(values)
    return stacked if reduction is None else reduction(stacked)


def _gather(states: list[_States], to: int, device: torch.device) -> list[list[_States]]:
    """Return the states of all ranks, by rank, on the rank `to`, and an empty list on others."""
    tensors: list[torch.Tensor] = []
    described = [[_outline(part, tensors) for part in metric] for metric in states]
    outlines = objects.all_gather(described)
    content = torch.cat(
        [
            torch.empty(0, dtype=torch.uint8, device=device),
            *(_bytes(tensor).to(device) for tensor in tensors),
        ]
    ).contiguous()
    sizes = [_size(outline) for outline in outlines]
    padded = torch.nn.functional.pad(content, (0, max(sizes) - len(content)))
    if dist.get_world_size() == 1:
        return [states]
    here = dist.get_rank() == to
    found = [torch.empty_like(padded) for _ in sizes] if here else None
    dist.gather(padded, found, dst=to)
    return [_restored(o, each) for o, each in zip(outlines, found or (), strict=here)]


def _outline(part: Mapping[str, Any], tensors: list[torch.Tensor]) -> dict[str, Any]:
    """Return the dtypes and shapes of states, and append their tensors."""
    outline: dict[str, Any] = {}
    for name, value in part.items():
        items = value if isinstance(value, list) else [value]
        if other := [each for each in items if not isinstance(each, torch.Tensor)]:
            raise ConfigError(
                f"a metric of task.metrics keeps {described(other[0])} in its state {name!r}: "
                "ranks can merge tensors, and lists of tensors"
            )
        tensors += items
        shapes = [[dtype_name(each.dtype), [*each.shape]] for each in items]
        outline[name] = shapes if isinstance(value, list) else shapes[0]
    return outline


def _restored(outline: Any, content: torch.Tensor) -> list[_States]:
    """Return the states that an outline describes, from the bytes of their tensors."""
    at = 0

    def taken(dtype: str, shape: list[int]) -> torch.Tensor:
        nonlocal at
        kind: torch.dtype = getattr(torch, dtype)
        size = kind.itemsize * math.prod(shape)
        # A view needs bytes that begin at a multiple of the item's size, which a copy has.
        found = content[at : at + size].clone().view(kind).view(shape)
        at += size
        return found

    return [
        [
            {
                name: [taken(*item) for item in each] if _is_list(each) else taken(*each)
                for name, each in part.items()
            }
            for part in metric
        ]
        for metric in outline
    ]


def _is_list(each: list[Any]) -> bool:
    return not each or isinstance(each[0], list)


def _size(outline: Any) -> int:
    items = [
        item
        for metric in outline
        for part in metric
        for each in part.values()
        for item in (each if _is_list(each) else [each])
    ]
    return sum(getattr(torch, dtype).itemsize * math.prod(shape) for dtype, shape in items)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)
