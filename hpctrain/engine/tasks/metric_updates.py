"""Metrics of torchmetrics in an evaluation: those that are no sum over samples, such as AUROC.

    begin (reset) ── for each batch { task.sums, task.measured ── update } ── compute

The metrics synchronise their states by themselves, over the ranks that
`engine.parallel.reducing.metric_states` tells. An evaluation that is stopped midway begins anew,
so no state has to be saved.
"""

from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from hpctrain.base.errors import ConfigError
from hpctrain.data.shards.types import Batch
from hpctrain.engine.tasks.task import SplitTask, Sums, Task, described, name_of

_NEEDED = ("update", "compute", "reset", "to", "modules")


class _Measuring(SplitTask):
    """A task that also remembers what its metrics are to be updated with in one evaluation.

    A pipeline may compute the sums of a micro-batch twice, once to learn shapes. So the last
    arguments of each micro-batch are kept until `update`. `updated` is whether there were samples.
    """

    def __init__(self, task: SplitTask, device: torch.device) -> None:
        self.metrics = {name: _moved(name, metric, device) for name, metric in task.metrics.items()}
        self.loss_parallel = task.loss_parallel
        self._task = task
        self._waiting: dict[int, tuple[Any, ...]] = {}
        self.updated = False
        for metric in self.metrics.values():
            metric.reset()

    def inputs(self, batch: Batch) -> tuple[torch.Tensor, ...]:
        """See `SplitTask`."""
        return self._task.inputs(batch)

    def sums(self, outputs: Any, batch: Batch) -> Sums:
        """See `SplitTask`."""
        counted, arguments = batch["mask"].bool(), self._task.measured(outputs, batch)
        self._waiting[id(batch)] = tuple(_counted(each, counted) for each in arguments)
        return self._task.sums(outputs, batch)

    def update(self, counted: bool) -> None:
        """Update the metrics after a batch."""
        waiting, self._waiting = self._waiting, {}
        for arguments in waiting.values():
            if not counted or not len(arguments[0]):
                continue
            self.updated = True
            for name, metric in self.metrics.items():
                try:
                    metric.update(*arguments)
                except (ValueError, RuntimeError, TypeError, LookupError) as error:
                    given = ", ".join(map(described, arguments))
                    raise ConfigError(
                        f"task.metrics.{name}={type(metric).__name__} got {given}, and refuses it: "
                        f"{' '.join(str(error).split())}"
                    ) from error


def measuring(task: Task, device: torch.device) -> _Measuring | None:
    """Return the task with its metrics, which begin an evaluation; None if it has none."""
    if not getattr(task, "metrics", None):
        return None
    if not isinstance(task, SplitTask):
        raise ConfigError(
            f"task._target_={name_of(task)} has metrics, but is no "
            "hpctrain.tasks.SplitTask, whose `measured` says what they get"
        )
    return _Measuring(task, device)


def _counted(argument: Any, counted: torch.Tensor) -> Any:
    """Return the rows of an argument that count: of a tensor, or of a list with an item each."""
    if isinstance(argument, torch.Tensor) and argument.shape[:1] == counted.shape:
        return argument.detach()[counted]
    if isinstance(argument, list) and len(argument) == len(counted):
        rows = zip(argument, counted.tolist(), strict=True)
        return [tree_map_only(torch.Tensor, torch.Tensor.detach, row) for row, in_ in rows if in_]
    raise ConfigError(
        f"the task's method `measured` returned {described(argument)} among its arguments, for "
        f"{len(counted)} samples: each is a tensor with a row, or a list with an item, for each of "
        "them"
    )


def _moved(name: str, metric: Any, device: torch.device) -> Any:
    if not all(callable(getattr(metric, each, None)) for each in _NEEDED):
        raise ConfigError(
            f"task.metrics.{name} is {described(metric)}; it must be a metric of torchmetrics, "
            "such as {_target_: torchmetrics.AUROC, task: multiclass, num_classes: 10}"
        )
    return metric.to(device)
