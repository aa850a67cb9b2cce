"""The recipe: one function turns a model into the model that is trained.

    for each stage:  begin ── cast ── plan ── freeze ── cut ── tp ── cp ── ep ── float8
                     ── checkpointing ── compile ── shard ── fill with the initial values
    then wrap:       ParallelModel, DDPModel, LocalSGDModel, FSDPModel or PipelineModel

The order matters: what is compiled contains the checkpointing, and what is sharded is compiled. A
model without a pipeline is one stage, and what does not apply to it is left out.
"""

import inspect
import logging
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from hpctrain.config.rules.batch_sizes import BatchSizes
from hpctrain.config.rules.pipeline_schedule import bubble
from hpctrain.config.schema import Config
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


def parallelize(
    build: Build,
    config: Config,
    mesh: Mesh,
    precision: Precision,
    *,
    loss_parallel: bool = False,
    arguments: Sequence[str] = (),
    trains: bool = True,
) -> ParallelModel:
    """Build the model and spread it over the ranks; all ranks call this together.

    `build` is called on the meta device, too. With `loss_parallel` the task computes the loss from
    logits that tensor parallel divides. `arguments` are those of the model that the task's inputs
    after the first are for; none if the task says nothing. A model that only evaluates is told
    nothing about training (`trains`).
    """
    recipe = _Recipe(build, config, mesh, precision, loss_parallel, trains)
    schedule, pp = config.parallel.pipeline.schedule, mesh.degrees.pp
    numbers = numbers_of(schedule, pp, mesh.pp_rank) if pp > 1 else [0]
    stages = [recipe.stage(number, first=i == 0) for i, number in enumerate(numbers)]
    check_arguments(stages[0].inputs, arguments)
    wrapped = recipe.pipeline(stages) if pp > 1 else recipe.wrapped(stages[0].module)
    wrapped.settings, wrapped.summary = stages[0].settings, stages[0].summary
    return wrapped


class _Recipe:
    """What the config decides; `whole` tells whether each rank has all parameters and gradients."""

    def __init__(
        self,
        build: Build,
        config: Config,
        mesh: Mesh,
        precision: Precision,
        loss_parallel: bool,
        trains: bool,
    ) -> None:
        self.trains = trains
        self.config, self.mesh, self.precision = config, mesh, precision
        self.parallel, self.train, self.degrees = config.parallel, config.train, mesh.degrees
        parallel, degrees = config.parallel, mesh.degrees
        self.build = lambda: with_adapters(build(), config.train.lora)
        self.divided_loss = loss_parallel and parallel.loss_parallel and degrees.tp > 1
        divided = degrees.ranks > degrees.dp_replicate or parallel.fsdp.offload or parallel.ep > 1
        self.whole = not divided
        self.accumulate = BatchSizes.of(config, degrees).accumulate * mesh.weight

    def stage(self, number: int, *, first: bool) -> _Stage:
        """Return what this rank has of a stage. Without a pipeline the model is one stage.

        What holds for the whole model is done and said with the `first` stage of this rank.
        """
        config, parallel, train, degrees = self.config, self.parallel, self.train, self.degrees
        mesh, device = self.mesh, self.precision.device
        storage = torch.device("cpu") if parallel.fsdp.offload else device
        # Rank 0 cannot send what it does not have, so the ranks of a stage build it themselves.
        from_rank_0 = not self.whole and degrees.pp == 1
        model, values = begin(self.build, config.seed, from_rank_0=from_rank_0)
        check_layers(model)
        cast_parameters(model, self.precision.params)
        prepare_modes(model, says=first)
        if first:
            prepare_batch_norms(model, mesh, config, self.accumulate, trains=self.trains)
        plan, names = Plan(), list[str]()
        if degrees.ranks > degrees.dp or parallel.ep > 1:
            plan = find_plan(model, parallel, degrees)
        if not self.whole or train.activation_checkpointing != "none" or train.compile == "blocks":
            names = [name for name, _ in find_blocks(model, parallel.blocks)]
        fp8 = self.precision.compute == "fp8"
        layers = float8_layers(model, parallel.blocks) if fp8 else []
        chosen = freeze(model, config.optimizer, parallel.blocks, train.lora)
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
        fill(model, values, self.build, config.seed, device, storage, mesh.stage_group)
        return _Stage(model, inputs, counts, loads, chosen, summary)

    def wrapped(self, module: nn.Module) -> ParallelModel:
        """Return the wrapper in which the ranks share the work of a step."""
        held = module, self.mesh, self.precision, self.accumulate
        if self.mesh.dp_cp_size == 1 and not self.parallel.fsdp.offload:
            return ParallelModel(*held, divided_loss=self.divided_loss)
        if not self.whole:
            return FSDPModel(*held, self.parallel, divided_loss=self.divided_loss)
        replicas = DDPModel if self.train.local_sgd.every is None else LocalSGDModel
        return replicas(*held, self.config)

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
            seed=self.config.seed,
            divided_loss=self.divided_loss,
        )
        pipeline.loads = Loads(pipeline.module, first.loads)
        return pipeline

    def _check_compile(self, plan: Plan) -> None:
        """Refuse a compiler that cannot have tensor parallel."""
        on_cpu = self.precision.device.type == "cpu"
        if on_cpu and self.train.compile != "off":
            raise ConfigError(
                f"train.compile={self.train.compile} with parallel.tp={self.parallel.tp} on CPUs: "
                "torch fails; use train.compile=off"
            )
