"""The recipe: one function turns a model into the model that is trained.

    for each stage:  begin ── cast ── plan ── freeze ── cut ── tp ── cp ── ep ── float8
                     ── checkpointing ── compile ── shard ── fill with the initial values
    then wrap:       ParallelModel, DDPModel, LocalSGDModel, FSDPModel or PipelineModel

The order matters: what is compiled contains the checkpointing, and what is sharded is compiled. A
model without a pipeline is one stage, and what does not apply to it is left out.
"""

import inspect
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from hpctrain.config.rules.pipeline_schedule import bubble
from hpctrain.config.schema import OptimizerConfig, ParallelConfig, TrainConfig
from hpctrain.engine.layers.plan import Plan
from hpctrain.engine.layers.quantized import release
from hpctrain.engine.parallel import second_gradients
from hpctrain.engine.parallel.dividing.chosen_plan import find_plan
from hpctrain.engine.parallel.dividing.expert_parallel import divide_experts
from hpctrain.engine.parallel.dividing.stages import block_counts, cut, numbers_of, present
from hpctrain.engine.parallel.dividing.tensor import divide_layers, sequence_is_divided
from hpctrain.engine.parallel.mesh import Mesh
from hpctrain.engine.parallel.precision import Precision, compute_in_float8, float8_layers
from hpctrain.engine.parallel.preparing.activation_checkpointing import checkpoint_activations
from hpctrain.engine.parallel.preparing.batch_norm import prepare_batch_norms
from hpctrain.engine.parallel.preparing.blocks import find_blocks
from hpctrain.engine.parallel.preparing.initial import Build, begin, fill, share
from hpctrain.engine.parallel.preparing.model_summary import ModelSummary
from hpctrain.engine.parallel.preparing.parameter_settings import Setting, freeze, with_adapters
from hpctrain.engine.parallel.preparing.whole_model import (
    cast_parameters,
    check_layers,
    prepare_modes,
)
from hpctrain.engine.parallel.reducing.expert_loads import Loads, compute_eagerly, load_sizes
from hpctrain.engine.parallel.wrappers.ddp import DDPModel, LocalSGDModel
from hpctrain.engine.parallel.wrappers.fsdp import FSDPModel, shard
from hpctrain.engine.parallel.wrappers.parallel_model import ParallelModel
from hpctrain.engine.parallel.wrappers.pipeline import PipelineModel
from hpctrain.engine.tasks.task import check_arguments
from hpctrain.errors import ConfigError

log = logging.getLogger(__name__)


class _Stage(NamedTuple):
    """A model that is ready to be wrapped, or one stage of it."""

    module: nn.Module
    inputs: list[str]
    counts: list[int]
    loads: dict[str, int]
    settings: dict[str, Setting]
    summary: ModelSummary


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
    recipe = _Recipe(build, parallel, mesh, precision, training)
    schedule, pp = parallel.pipeline.schedule, mesh.degrees.pp
    numbers = numbers_of(schedule, pp, mesh.pp_rank) if pp > 1 else [0]
    stages = [recipe.stage(number, first=i == 0) for i, number in enumerate(numbers)]
    check_arguments(stages[0].inputs, training.arguments)
    wrapped = recipe.pipeline(stages) if pp > 1 else recipe.wrapped(stages[0].module)
    wrapped.settings, wrapped.summary = stages[0].settings, stages[0].summary
    return wrapped


class _Recipe:
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
        self.degrees = degrees = mesh.degrees
        self.build = build
        if not isinstance(build, nn.Module):
            self.build = lambda: with_adapters(build(), training.train.lora)
        divides_logits = training.loss_parallel and parallel.loss_parallel
        self.divided_loss = divides_logits and degrees.tp > 1
        divided = degrees.ranks > degrees.dp_replicate or parallel.fsdp.offload or parallel.ep > 1
        self.whole = not divided

    def stage(self, number: int, *, first: bool) -> _Stage:
        """Return what this rank has of a stage. Without a pipeline the model is one stage.

        What holds for the whole model is done and said with the `first` stage of this rank.
        """
        training, parallel, train = self.training, self.parallel, self.train
        degrees, seed = self.degrees, training.seed
        mesh, device = self.mesh, self.precision.device
        storage = torch.device("cpu") if parallel.fsdp.offload else device
        # Rank 0 cannot send what it does not have, so the ranks of a stage build it themselves.
        from_rank_0 = not self.whole and degrees.pp == 1
        model, values = begin(self.build, seed, from_rank_0=from_rank_0)
        check_layers(model)
        cast_parameters(model, self.precision.params)
        prepare_modes(model, says=first)
        if first:
            advice = self.accumulate, training.norm, training.may_sync
            prepare_batch_norms(model, mesh, train, *advice, trains=training.says)
        plan, names = Plan(), list[str]()
        if degrees.ranks > degrees.dp or parallel.ep > 1:
            plan = find_plan(model, parallel, degrees)
        if not self.whole or train.activation_checkpointing != "none" or train.compile == "blocks":
            names = self._blocks(model)
        fp8 = self.precision.compute == "fp8"
        layers = float8_layers(model, parallel.blocks) if fp8 else []
        chosen: dict[str, Setting] = {}
        if training.ours:
            chosen = freeze(model, training.optimizer, parallel.blocks, train.lora)
        summary = ModelSummary.of(model, parallel.blocks)
        inputs, loads = list(inspect.signature(model.forward).parameters), load_sizes(model)
        counts: list[int] = []
        if degrees.pp > 1:
            counts = block_counts(model, plan, parallel, degrees.pp)
            cut(model, plan, counts, number)
            if number > 0 and hasattr(model, "sequence_parts"):  # of a sequence within the stages
                tp = degrees.tp if sequence_is_divided(plan, parallel) else 1
                setattr(model, "sequence_parts", degrees.cp * tp)  # noqa: B010 (mypy)
        if train.lora.quantize:
            release(model, storage)
        if values == "built":
            model.to(storage)
            share(model, mesh.stage_group)  # replicas may have drawn other values
        if degrees.tp > 1:
            self._check_compile(plan)
            divide_layers(model, plan, mesh, parallel, loss_parallel=self.divided_loss)
        if mesh.sequence_part is not None:
            model.context = mesh.sequence_part  # type: ignore[assignment]
        experts = divide_experts(model, plan, mesh, parallel.ep)
        if layers:
            compute_in_float8(model, layers)
        blocks = list(present(model, names))
        checkpoint_activations(blocks, train.activation_checkpointing)
        if train.compile == "off":  # torch refuses by itself what is compiled
            second_gradients.refuse(blocks, mesh)
        else:
            compute_eagerly(model)
            for module in [model] if train.compile == "model" else blocks:
                module.compile()
        if not self.whole and (mesh.dp_cp_size > 1 or parallel.fsdp.offload):
            compiled = train.compile != "off"
            shard(model, blocks, mesh, self.precision, parallel, experts, compiled=compiled)
        fill(model, values, self.build, seed, device, storage, mesh.stage_group)
        return _Stage(model, inputs, counts, loads, chosen, summary)

    def wrapped(self, module: nn.Module) -> ParallelModel:
        """Return the wrapper in which the ranks share the work of a step."""
        held = module, self.mesh, self.precision, self.accumulate
        alone = self.mesh.dp_cp_size == 1 and not self.parallel.fsdp.offload
        trained = any(parameter.requires_grad for parameter in module.parameters())
        if alone or (self.whole and not trained):
            return ParallelModel(*held, divided_loss=self.divided_loss)
        if not self.whole:
            return FSDPModel(*held, self.parallel, divided_loss=self.divided_loss)
        replicas = DDPModel if self.train.local_sgd.every is None else LocalSGDModel
        return replicas(*held, self.parallel, self.train)

    def pipeline(self, stages: list[_Stage]) -> PipelineModel:
        """Return the stages of this rank with their schedule."""
        schedule, first = self.parallel.pipeline.schedule, stages[0]
        if dist.get_rank() == 0:
            log.info(
                "pipeline %s: stages of %s blocks, %d micro-batches, expected bubble %.1f%%",
                *(schedule, " + ".join(map(str, first.counts)), self.accumulate),
                100 * bubble(schedule, self.degrees.pp, self.accumulate),
            )
        pipeline = PipelineModel(
            [stage.module for stage in stages],
            *(self.mesh, self.precision, self.accumulate),
            schedule=schedule,
            inputs=first.inputs,
            seed=self.training.seed,
            divided_loss=self.divided_loss,
        )
        pipeline.loads = Loads(pipeline.module, first.loads)
        return pipeline

    def _blocks(self, model: nn.Module) -> list[str]:
        """Return the names of the blocks of a whole model."""
        try:
            return [name for name, _ in find_blocks(model, self.parallel.blocks)]
        except ConfigError as error:
            if self.training.ours:
                raise
            if dist.get_rank() == 0:
                log.info("its parameters are gathered all together: %s", error)
        return []

    def _check_compile(self, plan: Plan) -> None:
        """Refuse a compiler that cannot have tensor parallel."""
        on_cpu = self.precision.device.type == "cpu"
        if on_cpu and self.train.compile != "off":
            raise ConfigError(
                f"train.compile={self.train.compile} with parallel.tp={self.parallel.tp} on CPUs: "
                "torch fails; use train.compile=off"
            )
