"""The interface of tasks. A task turns a batch into sums.

A task returns *sums and counts*, never means: `{"loss": (sum, count), "accuracy": (sum, count)}`.
The trainer adds them over micro-batches and ranks and divides once. So accumulation, DDP and a
padded last batch give the same numbers as one process. The gradient is that of `"loss"`.

    batch ── inputs ── model ── outputs ──┐
      └───────────────────────────────────┴── sums        (a SplitTask)
"""

import json
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from hpctrain.base.errors import ConfigError
from hpctrain.data.shards.types import Batch

_LIBRARIES = {*sys.stdlib_module_names, "torch", "hpctrain", "numpy", "omegaconf", "torchmetrics"}


def described(value: Any) -> str:
    """Return what a value is, with the dtype and shape of its tensors.

    >>> described((torch.zeros(2, 3), None))
    'a tuple of float32 (2, 3), None'
    """
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
    if isinstance(value, dict):
        items = ", ".join(f"{name}: {described(each)}" for name, each in value.items())
        return f"a dict of {items}" if items else "an empty dict"
    if isinstance(value, tuple | list):
        kind = type(value).__name__
        items = ", ".join(described(each) for each in value)
        return f"a {kind} of {items}" if items else f"an empty {kind}"
    if value is None or isinstance(value, int | float | bool):
        return str(value)
    return f"an object of {type(value).__module__}.{type(value).__qualname__}"


Sums = dict[str, tuple[torch.Tensor, torch.Tensor]]


class Task(Protocol):
    """A callable that returns the same names in the same order on every call.

    In an evaluation, without gradients, it may return others than in training.

    A task may also have the methods `derived`, `bind`, `on` and `at_step`, which the functions
    `derived`, `bind`, `on_part` and `at_step` use, `state_dict` and `load_state_dict` (see
    `TaskState`), and an attribute `counts`: what the count of its `loss` is a number of, such as
    "tokens", for which there are metrics of their own.
    """

    def __call__(self, model: nn.Module, batch: Batch) -> Sums:
        """Run the model on a batch, which is on the model's device; return sums and counts."""


class CutsSequence(Protocol):
    """The part of every sequence that a rank has under context parallel."""

    cp: int

    def cut(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """Return the part of this rank of a tensor whose dimension `dim` has all positions."""


class SplitTask(ABC):
    """A task with a cut between the model and the loss, which pipeline parallel needs.

    Attributes:
        loss_parallel: Whether `sums` computes with logits that the ranks of tensor parallel have
            divided by their last dimension (a DTensor).
        arguments: The names of the model's arguments that the inputs after the first are for, in
            their order; empty gives them whatever they are called.
        metrics: Metrics of torchmetrics by name, which an evaluation updates with what `measured`
            returns (`hpctrain.engine.tasks.metric_updates`).
    """

    loss_parallel = False
    arguments: tuple[str, ...] = ()
    metrics: Mapping[str, Any] = {}

    def __call__(self, model: nn.Module, batch: Batch) -> Sums:
        """See `Task`."""
        return self.sums(model(*self.inputs(batch)), batch)

    @abstractmethod
    def inputs(self, batch: Batch) -> tuple[torch.Tensor, ...]:
        """Return the positional arguments of the model, with the samples along the first axis."""

    @abstractmethod
    def sums(self, outputs: Any, batch: Batch) -> Sums:
        """Return the sums and counts of a `Task`; `outputs` are the model's for `inputs(batch)`."""

    def measured(self, outputs: Any, batch: Batch) -> tuple[Any, ...]:
        """Return the arguments of `update` of each of `metrics`, with samples along the first axis.

        Each is a tensor, or a list with an item for each sample, such as a text or a dict of boxes.
        `outputs` are the model's for `inputs(batch)`. Rows whose mask is False are left out by the
        caller.
        """
        raise ConfigError(
            f"{name_of(self)} has metrics, but no method "
            "`measured(outputs, batch)`, which returns what they are updated with, such as "
            "(predictions, targets)"
        )


def check_arguments(names: Sequence[str], needed: Sequence[str]) -> None:
    """Refuse a model for whose other arguments the inputs of a task would be."""
    found = [*names[1 : 1 + len(needed)]]
    if found == [*needed]:
        return
    wrong = ", ".join(found) if found else "none"
    raise ConfigError(
        f"the task gives the model {', '.join(needed)} after its first argument, but there its "
        f"forward({', '.join(names)}) has {wrong}: a model that takes {', '.join(needed)} has "
        "arguments of these names in these places, as hpctrain.models.Transformer has; "
        "task.documents=false gives it none"
    )


def checked(sums: Any) -> Sums:
    """Return what a task has returned, if it is sums and counts."""
    if not isinstance(sums, dict):
        raise ConfigError(f"the task returned {described(sums)}: {_FORM}")
    if "loss" not in sums:
        raise ConfigError(f"the task returned {', '.join(sums) or 'nothing'}, but no loss: {_FORM}")
    for name, pair in sums.items():
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise ConfigError(f"the task's {name} is {described(pair)}: {_FORM}")
        for value, what in zip(pair, ("sum", "count"), strict=True):
            if not isinstance(value, torch.Tensor) or value.dim():
                raise _no_number(f"{what} of the task's {name}", value)
    if sums["loss"][1].requires_grad:
        raise ConfigError(_LEARNED_COUNT)
    return sums


def _no_number(what: str, value: Any) -> ConfigError:
    cure = "add it up with .sum()" if isinstance(value, torch.Tensor) else ""
    cure = cure or 'batch["mask"].sum() is the number of samples'
    return ConfigError(f"the {what} is {described(value)}: {_FORM}; {cure}")


_FORM = 'a task returns {"loss": (sum, count), ...}, whose values are tensors of shape ()'
_LEARNED_COUNT = (
    "the count of the task's loss depends on the model: it requires a gradient, but the gradient "
    "of a step is that of the sum, divided by the count of all ranks. A ratio of two sums over a "
    "batch (Dice, Tversky, soft F1) or a count of learned weights would train with another "
    "gradient than it has. Give a loss for each sample, such as its own Dice: the sum of these and "
    "the number of samples; or detach() the count, if it is to be taken as a constant"
)


def derived(task: Task, means: dict[str, float]) -> dict[str, float]:
    """Return the means, followed by the metrics that the task computes from them.

    Perplexity, for example, is exp(loss) of the mean over all ranks and steps, not a mean of
    perplexities. A task that has some has a method `derived(means)`. Means are empty if there was
    no batch.
    """
    method = getattr(task, "derived", None)
    return means if method is None or not means else {**means, **method(means)}


def bind(task: Task, source: str | Path) -> Task:
    """Return the task with what it needs to know of the data set, by its method `bind(source)`."""
    method = getattr(task, "bind", None)
    bound: Task = task if method is None else method(source)
    return bound


def on_device(task: Task, device: torch.device) -> Task:
    """Return the task with its modules, and tensors that are attributes of it, on the device."""
    for module in (task, *tree_leaves(own := getattr(task, "__dict__", {}))):
        if isinstance(module, nn.Module):
            module.to(device)
    for name, value in own.items():
        if isinstance(value, torch.Tensor) and value.device != device:
            moved = value.detach().to(device)
            kept = isinstance(value, nn.Parameter)
            own[name] = nn.Parameter(moved, value.requires_grad) if kept else moved
    return task


def on_part(task: Task, part: CutsSequence | None) -> Task:
    """Return the task that adds up only the positions of this rank.

    Its method `on(part)` returns the task for a model whose outputs are those of a part of each
    sequence; batches still have whole sequences. None returns the task itself.
    """
    if part is None:
        return task
    method = getattr(task, "on", None)
    if method is None:
        raise ConfigError(
            f"task._target_={name_of(task)} has no method `on`, by which "
            f"parallel.cp={part.cp} gives it a part of each sequence; "
            "hpctrain.tasks.LanguageModel has one"
        )
    divided: Task = method(part)
    return divided


def at_step(task: Task, step: int) -> None:
    """Tell the task that the model has made `step` steps, by its method `at_step(step)`.

    It is told before each step and each evaluation, on all ranks, also after a resume: the right
    place for what changes during a training, such as the weight of a term or a temperature.
    """
    method = getattr(task, "at_step", None)
    if method is not None:
        method(step)


class TaskState:
    """What a checkpoint has of a task: what its own method `state_dict` returns, as JSON.

    A checkpoint has the state of rank 0, and `load_state_dict` gives it to all ranks. `exists` is
    false for a task without a method of its own, as a module that is a task.
    """

    def __init__(self, task: Task) -> None:
        self._task: Any = task
        method = getattr(type(task), "state_dict", None)
        self.exists = method is not None and method is not nn.Module.state_dict

    def state_dict(self) -> Any:
        """Return the state; it is a ConfigError if JSON has no form for it."""
        if not self.exists:
            return {}
        try:
            return json.loads(json.dumps(self._task.state_dict()))
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"{name_of(self._task)}.state_dict() must return numbers, texts, lists and dicts, "
                f"as JSON has them ({error}); tensors are kept in buffers of the model"
            ) from error

    def load_state_dict(self, state: Any) -> None:
        """Give the task what `state_dict` has returned; checkpoints of before have nothing."""
        if self.exists and state:
            self._task.load_state_dict(state)


def name_of(task: Any) -> str:
    """Return what `_target_` calls the class of a task."""
    return f"{type(task).__module__}.{type(task).__qualname__}"


def is_foreign(thing: Any) -> bool:
    """Return whether a class of an object is neither Python's nor torch's nor ours."""
    return not {kind.__module__.partition(".")[0] for kind in type(thing).__mro__} <= _LIBRARIES
