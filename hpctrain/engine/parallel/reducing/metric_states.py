"""The metrics of torchmetrics over the samples of all ranks, by its own synchronisation.

    rank 0   states ──┐
    rank 1   states ──┼── a group of the ranks that have states ── compute ── all ranks
    rank 2   (none) ──┘

By itself torchmetrics would gather over all ranks. That would count the samples of ranks that
divide a layer several times, and it would wait for ever for a rank without samples.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from hpctrain.base.errors import ConfigError
from hpctrain.engine.distributed import objects
from hpctrain.engine.parallel.mesh import Mesh
from hpctrain.engine.tasks.metric_updates import measuring
from hpctrain.engine.tasks.task import Task, described


class MeasuredTask:
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
        """Return the metrics over the samples of all ranks, the same on all of them.

        All ranks call this. If no rank has had samples, there are none.
        """
        if self._measuring is None:
            return {}
        ranks = [i for i, has in enumerate(objects.all_gather(self._measuring.updated)) if has]
        if not ranks:
            return {}
        metrics = self._measuring.metrics
        every = [dict(_sizes(m)) if self._measuring.updated else {} for m in metrics.values()]
        shapes = [one for n, one in enumerate(objects.all_gather(every)) if n in ranks]
        for number, name in enumerate(metrics):
            _check_states(f"task.metrics.{name}", [each[number] for each in shapes])
        values: dict[str, float | str] = {}
        group = dist.new_group(ranks) if 1 < len(ranks) < dist.get_world_size() else None
        if self._measuring.updated:
            for name, metric in metrics.items():
                values[name] = _value(metric, group, several=len(ranks) > 1)
        if group is not None and self._measuring.updated:
            dist.destroy_process_group(group)
        for name, value in objects.broadcast(values, ranks[0]).items():
            if isinstance(value, str):
                raise ConfigError(
                    f"task.metrics.{name} is {value}; a metric is one number: choose an average "
                    "(average: macro), or give each part its own metric"
                )
            values[name] = value
        return {name: float(value) for name, value in values.items()}


def _value(metric: Any, group: dist.ProcessGroup | None, *, several: bool) -> float | str:
    """Return the value of a metric, or what it is if it is not one number."""
    for part in metric.modules():
        part.process_group, part.distributed_available_fn = group, lambda: several
    try:
        value = metric.compute()
    finally:
        for part in metric.modules():
            part.process_group = None
    if isinstance(value, torch.Tensor):
        return float(value) if value.numel() == 1 else f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, int | float):
        return float(value)
    return f"a dict of {', '.join(map(str, value))}" if isinstance(value, dict) else repr(value)


def _sizes(metric: Any) -> Iterator[tuple[str, int | str]]:
    """Yield the number of tensors of each state that torchmetrics gathers, or what else is there.

    Lists that are joined are one tensor. Metrics with a synchronisation of their own are left out.
    """
    for i, part in enumerate(metric.modules()):
        if getattr(part, "_sync_dist", part).__module__ != "torchmetrics.metric":
            continue
        for name, how in part._reductions.items():
            found = getattr(part, name)
            items = found if isinstance(found, list) else [found]
            wrong = [each for each in items if not isinstance(each, torch.Tensor)]
            if wrong:
                yield f"{i}.{name}", described(wrong[0])
            else:
                joined = getattr(how, "__name__", "") == "dim_zero_cat"
                yield f"{i}.{name}", min(1, len(items)) if joined else len(items)


def _check_states(key: str, ranks: list[dict[str, Any]]) -> None:
    """Refuse states that ranks cannot gather: torchmetrics leaves them out, or waits for ever."""
    for state, size in ranks[0].items():
        name, sizes = state.partition(".")[2], [each.get(state) for each in ranks]
        if isinstance(size, str):
            raise ConfigError(
                f"{key} keeps {size} in its state {name!r}: ranks can merge tensors, and lists of "
                "tensors"
            )
        if len({*sizes}) > 1:
            raise ConfigError(
                f"{key}: the ranks have {sizes} tensors in its state {name!r}; torchmetrics merges "
                "lists that all ranks have alike, or that are joined (add_state with "
                "dist_reduce_fx='cat') and empty on none"
            )
