"""The states of metrics, merged over the ranks, and the values that follow from them.

    rank 0   states ──┐
    rank 1   states ──┼── one rank ── merged by each state's own reduction ── compute ── all ranks
    rank 2   (none) ──┘

A metric of torchmetrics declares its states and how they are merged (`add_state`,
`dist_reduce_fx`): sums are added, lists of samples are joined, and so on. Its own synchronisation
gathers over all ranks. That would count the samples of ranks that divide a layer several times,
and it would wait for ever for a rank without samples. So the states are gathered here.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_flatten, tree_unflatten, treespec_dumps, treespec_loads

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
    """Return the value of a metric for the states of several ranks; it has its own afterwards."""
    own = _states(metric)
    _merge(metric, found)
    try:
        return _number(metric.compute())
    finally:
        _set(metric, own)


def _number(value: Any) -> float | str:
    """Return the value of a metric, or what it is if it is not one number."""
    if isinstance(value, torch.Tensor):
        return float(value) if value.numel() == 1 else f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, int | float):
        return float(value)
    return f"a dict of {', '.join(map(str, value))}" if isinstance(value, dict) else repr(value)


def _parts(metric: Any) -> Iterator[Any]:
    """Yield a metric and the metrics inside it, such as those of a wrapper."""
    yield from (module for module in metric.modules() if hasattr(module, "_reductions"))


def _is_updated(metric: Any) -> bool:
    """Return whether a metric has had samples; without states it keeps its count at a reset."""
    return any(part._update_count for part in _parts(metric) if part._reductions)


def _states(metric: Any) -> _States:
    states = [{name: getattr(part, name) for name in part._reductions} for part in _parts(metric)]
    for name, value in (item for part in states for item in part.items()):
        for each in value if isinstance(value, list) else [value]:
            if not isinstance(each, torch.Tensor):
                raise ConfigError(
                    f"a metric of task.metrics keeps {described(each)} in its state {name!r}: "
                    "ranks can merge tensors, and lists of tensors"
                )
    return states


def _set(metric: Any, states: _States) -> None:
    for part, values in zip(_parts(metric), states, strict=True):
        for name, value in values.items():
            setattr(part, name, value)


def _merge(metric: Any, found: list[_States]) -> None:
    """Give a metric the states of several ranks, as torchmetrics itself does."""
    merged = found[0]
    if len(found) > 1:
        merged = [
            {name: _reduced(how, [ranks[n][name] for ranks in found]) for name, how in each.items()}
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
    if dist.get_world_size() == 1:
        return [states]
    outline, content = _as_bytes(states, device)
    outlines = objects.all_gather(outline)
    longest = max(sum(_sizes(items)) for _, items in outlines)
    padded = torch.nn.functional.pad(content, (0, longest - len(content)))
    here = dist.get_rank() == to
    found = [torch.empty_like(padded) for _ in outlines] if here else None
    dist.gather(padded, found, dst=to)
    return [_restored(o, each) for o, each in zip(outlines, found or (), strict=here)]


def _as_bytes(states: list[_States], device: torch.device) -> tuple[list[Any], torch.Tensor]:
    """Return an outline of states (their structure, dtypes and shapes), and their bytes."""
    tensors, structure = tree_flatten(states)
    items = [[dtype_name(each.dtype), [*each.shape]] for each in tensors]
    parts = (each.detach().contiguous().reshape(-1).view(torch.uint8) for each in tensors)
    nothing = torch.empty(0, dtype=torch.uint8, device=device)
    content = torch.cat([nothing, *(part.to(device) for part in parts)])
    return [treespec_dumps(structure), items], content


def _restored(outline: list[Any], content: torch.Tensor) -> list[_States]:
    """Return the states of a rank from what `_as_bytes` has made, possibly padded."""
    structure, items = outline
    parts = content[: sum(_sizes(items))].split(_sizes(items))
    # A view needs bytes that begin at a multiple of the item's size, which a copy has.
    tensors = [
        part.clone().view(getattr(torch, dtype)).view(shape)
        for part, (dtype, shape) in zip(parts, items, strict=True)
    ]
    states: list[_States] = tree_unflatten(tensors, treespec_loads(structure))
    return states


def _sizes(items: list[Any]) -> list[int]:
    return [getattr(torch, dtype).itemsize * math.prod(shape) for dtype, shape in items]
