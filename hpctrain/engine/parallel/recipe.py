"""The recipe: one function turns a model into the model that is trained.

    for each stage:  begin ── cast ── freeze ── change ── fill with the initial values
    change:          plan ── cut ── tp ── cp ── ep ── float8 ── checkpointing ── compile ── shard
    then wrap:       ParallelModel, DDPModel, LocalSGDModel, FSDPModel or PipelineModel

A model without a pipeline is one stage. What only some layouts need is imported for them alone.
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from hpctrain.config.schema import OptimizerConfig, ParallelConfig, TrainConfig
from hpctrain.engine.parallel.mesh import Mesh
from hpctrain.engine.parallel.precision import Precision
from hpctrain.engine.parallel.preparing.batch_norm import prepare_batch_norms
from hpctrain.engine.parallel.preparing.initial import Build, begin, fill, place
from hpctrain.engine.parallel.preparing.model_summary import ModelSummary
from hpctrain.engine.parallel.preparing.parameter_settings import Setting, freeze, with_adapters
from hpctrain.engine.parallel.preparing.whole_model import (
    cast_parameters,
    check_layers,
    prepare_modes,
)
from hpctrain.engine.parallel.reducing.expert_loads import load_sizes
from hpctrain.engine.parallel.wrappers.parallel_model import ParallelModel
from hpctrain.engine.tasks.task import check_arguments


class Stage(NamedTuple):
    """A model that is ready to be wrapped, or one stage of it; `counts` are the stages' blocks."""

    module: nn.Module
    inputs: list[str]
    counts: list[int]
    loads: dict[str, int]
    settings: dict[str, Setting]
    summary: ModelSummary

    def known(self, wrapped: ParallelModel) -> ParallelModel:
        """Let the wrapped model know what this stage knows of the whole model, and return it."""
        wrapped.settings, wrapped.summary = self.settings, self.summary
        return wrapped


@dataclass(frozen=True)
class Training:
    """How a model is trained, beside its layout and its formats.

    Attributes:
        seed: What initial values are drawn from.
        accumulate: The micro-batches of this rank.
        norm: The kind of the model's norm, if its config names one, for an advice.
        may_sync: Returns whether `train.sync_batchnorm` is possible, for an advice.
        loss_parallel: Whether the task computes the loss from logits that tensor parallel divides.
        arguments: Those of the model that the task's inputs after the first are for; none if the
            task says nothing.
        says: Whether rank 0 says what to know about a training. A model may only evaluate.
        ours: Whether our loop trains it. One in a loop of the user's may have no blocks, and need
            not be trained.
    """

    train: TrainConfig
    optimizer: OptimizerConfig
    seed: int = 0
    accumulate: int = 1
    norm: Any = None
    may_sync: Callable[[], bool] = bool
    loss_parallel: bool = False
    arguments: Sequence[str] = ()
    says: bool = True
    ours: bool = True


def parallelize(
    build: Build, parallel: ParallelConfig, mesh: Mesh, precision: Precision, training: Training
) -> ParallelModel:
    """Build the model and spread it over the ranks; all ranks call this together.

    `build` is called on the meta device, too; or it is a module that every rank has built, which
    gets the values of rank 0.
    """
    recipe = Recipe(build, parallel, mesh, precision, training)
    if mesh.degrees.pp > 1:
        from hpctrain.engine.parallel.changes import pipeline

        return pipeline(recipe)
    stage = recipe.stage(0, first=True)
    return stage.known(recipe.wrapped(stage.module))


class Recipe:
    """What the config decides; `whole` tells whether each rank has all parameters and gradients."""

    def __init__(
        self,
        build: Build,
        parallel: ParallelConfig,
        mesh: Mesh,
        precision: Precision,
        training: Training,
    ) -> None:
        self.training, self.train, self.accumulate = training, training.train, training.accumulate
        self.parallel, self.mesh, self.precision = parallel, mesh, precision
        self.build, degrees, lora = build, mesh.degrees, training.train.lora
        if lora.patterns:
            self.build = lambda: with_adapters(build(), lora)
        divides_logits = training.loss_parallel and parallel.loss_parallel
        self.divided_loss = divides_logits and degrees.tp > 1
        divided = degrees.ranks > degrees.dp_replicate or parallel.fsdp.offload or parallel.ep > 1
        self.whole = not divided

    def stage(self, number: int, *, first: bool) -> Stage:
        """Return what this rank has of a stage. Without a pipeline the model is one stage.

        What holds for the whole model is done and said with the `first` stage of this rank.
        """
        training, parallel, train, mesh = self.training, self.parallel, self.train, self.mesh
        device = self.precision.device
        storage = torch.device("cpu") if parallel.fsdp.offload else device
        # Rank 0 cannot send what it does not have, so the ranks of a stage build it themselves.
        from_rank_0 = not self.whole and mesh.degrees.pp == 1
        model, values = begin(self.build, training.seed, from_rank_0=from_rank_0)
        check_layers(model)
        cast_parameters(model, self.precision.params)
        prepare_modes(model, says=first)
        if first:
            advice = self.accumulate, training.norm, training.may_sync
            prepare_batch_norms(model, mesh, train, *advice, trains=training.says)
        chosen: dict[str, Setting] = {}
        if training.ours:
            chosen = freeze(model, training.optimizer, parallel.blocks, train.lora)
        summary = ModelSummary.of(model, parallel.blocks)
        inputs, loads = list(inspect.signature(model.forward).parameters), load_sizes(model)
        check_arguments(inputs, training.arguments)
        counts: list[int] = []
        if self._changes:
            from hpctrain.engine.parallel.changes import change

            counts = change(self, model, number, values, storage)
        else:
            place(model, values, storage, mesh.stage_group)
        fill(model, values, self.build, training.seed, device, storage, mesh.stage_group)
        return Stage(model, inputs, counts, loads, chosen, summary)

    @property
    def _changes(self) -> bool:
        """Whether modules are divided, or compute in another way."""
        train = self.train
        computes = train.activation_checkpointing != "none" or train.compile != "off"
        quantized = train.lora.quantize or self.precision.compute == "fp8"
        return not self.whole or computes or bool(quantized)

    def wrapped(self, module: nn.Module) -> ParallelModel:
        """Return the wrapper in which the ranks share the work of a step."""
        held = module, self.mesh, self.precision, self.accumulate
        alone = self.mesh.dp_cp_size == 1 and not self.parallel.fsdp.offload
        if alone or (self.whole and not any(p.requires_grad for p in module.parameters())):
            return ParallelModel(*held, divided_loss=self.divided_loss)
        if not self.whole:
            from hpctrain.engine.parallel.wrappers.fsdp import FSDPModel

            return FSDPModel(*held, self.parallel, divided_loss=self.divided_loss)
        from hpctrain.engine.parallel.wrappers.ddp import DDPModel, LocalSGDModel

        replicas = DDPModel if self.train.local_sgd.every is None else LocalSGDModel
        return replicas(*held, self.parallel, self.train)
