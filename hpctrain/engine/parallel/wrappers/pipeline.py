"""Pipeline parallel: ranks have different layers, and micro-batches pass from one to the next.

    1f1b, 2 stages, 4 micro-batches (F forward, B backward, . bubble)

    rank 0   F0 F1 .  B0 F2 B1 F3 B2 .  B3
    rank 1   .  F0 B0 F1 B1 F2 B2 F3 B3 .

The schedules are those of torch (`torch.distributed.pipelining`): GPipe (Huang et al. 2019), 1F1B
(PipeDream-Flush, Narayanan et al. 2021), interleaved 1F1B, and two zero-bubble schedules (Qi et al.
2023). Only the last stage computes the loss, so the other ranks return sums of zero.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import xxhash
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

from hpctrain.base.errors import ConfigError
from hpctrain.base.processes.causes import is_out_of_memory
from hpctrain.config.schema.parallel import SCHEDULES
from hpctrain.data.generators import seeded_generators
from hpctrain.data.shards.types import Batch
from hpctrain.engine.distributed import objects
from hpctrain.engine.layers.dry_run import dry_run
from hpctrain.engine.parallel.dividing.stages import United, numbers_of, rank_of
from hpctrain.engine.parallel.dividing.tensor import whole_gradients
from hpctrain.engine.parallel.precision import Precision, wide_batch
from hpctrain.engine.parallel.preparing.whole_model import undivided
from hpctrain.engine.parallel.reducing.expert_loads import counts_loads
from hpctrain.engine.parallel.reducing.scalars import Numbers, added, flat, on_device, tensor_of
from hpctrain.engine.parallel.reducing.unused import Unused
from hpctrain.engine.parallel.setup import Setup
from hpctrain.engine.parallel.wrappers.parallel_model import ParallelModel, split
from hpctrain.engine.tasks.task import SplitTask, Task, checked, name_of

_CLASSES = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved": "Interleaved1F1B",
    "zbv": "ZBVZeroBubble",
    "interleaved_zb": "InterleavedZeroBubble",
}
# Every schedule keeps receive buffers for the shapes of its inputs.
_KEPT = 8


class PipelineModel(ParallelModel):
    """The stages of this rank, and the schedule by which they work.

    A step has `setup.accumulate` micro-batches; an evaluation has so many in any case. `inputs` are
    the names of the arguments of the model's forward function. What a task draws for the inputs of
    a step of the training is a function of the run's seed, because all stages need the same.
    """

    def __init__(self, stages: Sequence[nn.Module], inputs: Sequence[str], setup: Setup) -> None:
        mesh, schedule = setup.mesh, setup.parallel.pipeline.schedule
        if not hasattr(PipelineScheduleSingle, "_initialize_pp_stages"):
            raise ConfigError(
                f"parallel.pp={mesh.degrees.pp}: pipelines need torch 2.13 or newer; "
                f"this is torch {torch.__version__}"
            )
        module = stages[0] if len(stages) == 1 else United(stages)
        super().__init__(module, setup)
        pp, self._kind, self._inputs = mesh.degrees.pp, schedule, inputs
        self._seed, self._of_evaluation = setup.training.seed, setup.accumulate
        self._count = pp * SCHEDULES[schedule]
        numbers = numbers_of(schedule, pp, mesh.pp_rank)
        self._stages = dict(zip(numbers, stages, strict=True))
        self._is_first, self._is_last = 0 in numbers, self._count - 1 in numbers
        self._last_rank = rank_of(self._count - 1, schedule, pp)
        mesh.has_outputs = self._is_last
        for stage in stages:
            stage.forward = functools.partial(_forward, stage.forward, setup.precision)
        self._unused = []
        if mesh.dp_cp_size > 1:
            self._unused = [Unused(stage, undivided(stage), mesh.data_mesh) for stage in stages]
        self._schedules: dict[Any, Any] = {}
        self._names: dict[bool, list[str]] = {}  # of the sums, in training and in evaluations
        self._work: _Work | None = None

    @property
    def roots(self) -> list[nn.Module]:
        """The stages of this rank."""
        return [*self._stages.values()]

    def forward_backward(self, task: Task, batch: Batch) -> tuple[list[str], torch.Tensor]:
        """Add the gradient of the mean loss over this rank's rows; reduce it over the ranks.

        The ranks of a pipeline have the same batch.
        """
        names, values = self._run(task, batch, train=True)
        for unused in self._unused:
            unused.average()
        if self.mesh.degrees.tp > 1:
            whole_gradients(self.parameters)
        return names, values

    def evaluate(self, task: Task, batch: Batch) -> tuple[list[str], torch.Tensor]:
        """Return the names and sums of a forward pass."""
        with torch.no_grad():
            return self._run(task, batch, train=False)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Forget the schedules and the names of the evaluations within this context."""
        schedules, names = dict(self._schedules), dict(self._names)
        try:
            yield
        finally:
            self._schedules, self._names = schedules, names

    def _run(self, task: Task, batch: Batch, *, train: bool) -> tuple[list[str], torch.Tensor]:
        if not isinstance(task, SplitTask):
            raise ConfigError(
                f"parallel.pp={self.mesh.degrees.pp} with task._target_="
                f"{name_of(task)}: a pipeline needs a task that "
                "is a hpctrain.tasks.SplitTask, with the methods `inputs` and `sums`"
            )
        batch = wide_batch(batch)
        text = f"{self._seed} {self.mesh.dp_rank} {self.step}".encode()
        drawing = seeded_generators(xxhash.xxh64_intdigest(text) >> 1) if train else nullcontext()
        with drawing:  # the stages leave the generators at different places
            values = task.inputs(batch)
        parts = self.accumulate if train else self._of_evaluation
        schedule = self._schedule(values, train, parts)
        arguments = values[:1] if self._is_first else ()
        others = dict(zip(self._inputs[1 : len(values)], values[1:], strict=True))
        target = torch.arange(parts) if self._is_last else None
        micros = [micro for micro, _ in split(batch, parts)]
        self._work = work = _Work(task, micros, self.precision.scale / len(batch["mask"]))
        run = schedule.step if train else schedule.eval
        try:
            with self._loss():
                run(*arguments, target=target, return_outputs=False, **others)
        except RuntimeError as error:
            cause = error.__cause__
            if isinstance(cause, ConfigError) or (cause is not None and is_out_of_memory(cause)):
                raise cause from None  # without torch's text about the stage
            raise
        finally:
            self._work = None
        names = self._names.get(train)
        if names is None:
            names = objects.broadcast(work.names, self._last_rank, self.mesh.pp_group)
            self._names[train] = names
        if self._is_last and self.mesh.tp_rank == 0:
            return names, tensor_of(added([*work.sums.values()]))
        return names, on_device([0.0] * 2 * len(names), batch["mask"].device)

    def _schedule(self, inputs: tuple[torch.Tensor, ...], train: bool, parts: int) -> Any:
        """Return the schedule for these inputs; torch's are made for one shape."""
        key = (train, parts, *((x.shape, x.dtype) for x in inputs))
        schedule = self._schedules.pop(key, None) or self._new_schedule(parts)
        self._schedules[key] = schedule  # the last used is the last in the dict
        if len(self._schedules) > _KEPT:
            del self._schedules[next(iter(self._schedules))]
        return schedule

    def _new_schedule(self, parts: int) -> Any:
        made = [
            _Stage(module, number, self._count, self.mesh.device, group=self.mesh.pp_group)
            for number, module in self._stages.items()
        ]
        for stage in made:
            stage.whole = set()
            stage.experts = [*filter(counts_loads, stage.submod.modules())]
        schedule = get_schedule_class(_CLASSES[self._kind])(
            made[0] if len(made) == 1 else made, parts, loss_fn=self._loss_of, scale_grads=False
        )
        learn = schedule._initialize_pp_stages

        def learn_once(*args: Any, **kwargs: Any) -> Any:
            """Learn the shapes, by a pass in which all stages but the first get random numbers."""
            del schedule._initialize_pp_stages  # later calls run nothing
            with dry_run(*self.roots):
                return learn(*args, **kwargs)

        schedule._initialize_pp_stages = learn_once
        return schedule

    def _loss_of(self, outputs: Any, number: torch.Tensor) -> torch.Tensor:
        """Return the part of the loss of the micro-batch `number`, and keep its sums."""
        assert self._work is not None
        work, index = self._work, int(number)
        with self.precision.forward():
            sums = checked(work.task.sums(outputs, work.micros[index]))
        # torch computes a loss once more to learn shapes, so the same number may come again.
        work.sums[index] = flat(sums)
        work.names = list(sums)
        return sums["loss"][0] * work.factor


@dataclass
class _Work:
    """One pass of a batch through the schedule, for the loss function."""

    task: SplitTask
    micros: list[Batch]
    factor: float
    names: list[str] = field(default_factory=list)
    sums: dict[int, Numbers] = field(default_factory=dict)


def _forward(forward: Callable[..., Any], precision: Precision, *args: Any, **kwargs: Any) -> Any:
    """Call the forward function of a stage; return a tensor, which torch can send."""
    with precision.forward():
        outputs = forward(*args, **kwargs)
    outputs = getattr(outputs, "logits", outputs)
    # The zero-bubble schedules detach what a stage returns in place, which a view does not allow.
    return outputs.clone() if outputs._is_view() else outputs


class _Stage(PipelineStage):
    """A stage that counts loads of experts, may come after frozen ones, and can be evaluated."""

    experts: list[Any]
    whole: set[int]

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        if fwd_chunk_id == 0:  # the passes by which torch learns shapes do not count
            for module in self.experts:
                module.start_loads()
        return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(
        self,
        bwd_chunk_id: int,
        loss: Any = None,
        full_backward: bool = True,
        last_backward: Any = False,
    ) -> Any:
        if self.has_backward and not full_backward and not self.is_first:
            # torch finds the weights of the second half on the way from the outputs to inputs that
            # need a gradient. There are none if all stages before this one are frozen.
            inputs = self.fwd_cache[bwd_chunk_id][1]
            full_backward = not any(isinstance(x, torch.Tensor) and x.requires_grad for x in inputs)
            if full_backward:
                self.whole.add(bwd_chunk_id)
        return super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: Any = False) -> Any:
        if bwd_chunk_id in self.whole:
            self.whole.remove(bwd_chunk_id)
            return None
        return super().backward_weight_one_chunk(bwd_chunk_id, last_backward)

    def get_local_bwd_output(self, mb_index: int) -> Any:
        """Return the gradient of the input; in an evaluation torch asks for it and raises."""
        if not self.has_backward:
            return ()
        return super().get_local_bwd_output(mb_index)  # type: ignore[no-untyped-call]

    def set_local_bwd_input(self, next_stage_bwd_outputs: Any, mb_index: int) -> None:
        """Take the gradient of the output from the next stage, which is on the same rank."""
        if self.has_backward:
            super().set_local_bwd_input(next_stage_bwd_outputs, mb_index)
