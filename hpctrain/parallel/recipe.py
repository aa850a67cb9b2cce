"""The recipe: one function turns a model into the model that is trained.

    for each stage:  begin ── cast ── plan ── freeze ── cut ── tp ── cp ── ep ── float8
                     ── checkpointing ── compile ── shard ── fill with the initial values
    then wrap:       ParallelModel, DDPModel, LocalSGDModel, FSDPModel or PipelineModel

The order matters: what is compiled contains the checkpointing, and what is sharded is compiled. A
model without a pipeline is one stage, and what does not apply to it is left out.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from hpctrain.config.rules.batch_sizes import BatchSizes
from hpctrain.config.rules.pipeline_schedule import bubble
from hpctrain.config.schema import Config, LoRAConfig, ParallelConfig
from hpctrain.errors import ConfigError
from hpctrain.models.lora import add_adapters, check_trained, freeze_base
from hpctrain.models.plan import Plan
from hpctrain.parallel import second_gradients
from hpctrain.parallel.dividing.chosen_plan import find_plan
from hpctrain.parallel.dividing.expert_parallel import divide_experts
from hpctrain.parallel.dividing.stages import block_counts, cut, numbers_of, present
from hpctrain.parallel.dividing.tensor import divide_layers, sequence_is_divided
from hpctrain.parallel.mesh import Mesh
from hpctrain.parallel.precision import Precision
from hpctrain.parallel.preparing.activation_checkpointing import checkpoint_activations
from hpctrain.parallel.preparing.batch_norm import prepare_batch_norms
from hpctrain.parallel.preparing.blocks import find_blocks
from hpctrain.parallel.preparing.float8 import compute_in_float8, float8_layers
from hpctrain.parallel.preparing.initial import Build, begin, cast_parameters, fill, share
from hpctrain.parallel.preparing.model_summary import ModelSummary
from hpctrain.parallel.preparing.modes import prepare_modes
from hpctrain.parallel.preparing.parameter_settings import Setting, freeze, settings
from hpctrain.parallel.preparing.parameters import check_layers
from hpctrain.parallel.reducing.expert_loads import Loads, compute_eagerly, load_sizes
from hpctrain.parallel.wrappers.ddp import DDPModel
from hpctrain.parallel.wrappers.fsdp import FSDPModel, shard
from hpctrain.parallel.wrappers.local_sgd import LocalSGDModel
from hpctrain.parallel.wrappers.parallel_model import ParallelModel
from hpctrain.parallel.wrappers.pipeline import PipelineModel
from hpctrain.tasks.task import check_arguments

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
) -> ParallelModel:
    """Build the model and spread it over the ranks; all ranks call this together.

    `build` is called on the meta device, too. With `loss_parallel` the task computes the loss from
    logits that tensor parallel divides. `arguments` are those of the model that the task's inputs
    after the first are for; none if the task says nothing.

    Raises:
        ConfigError: The model has no blocks that could be found, or no plan, but needs them; or it
            has other arguments; or no parameter is left to be trained.
    """
    parallel, pp = config.parallel, mesh.degrees.pp
    if config.train.lora.patterns:
        build = partial(_with_adapters, build, config.train.lora)
    divided_loss = loss_parallel and parallel.loss_parallel and mesh.degrees.tp > 1
    numbers = numbers_of(parallel.pipeline.schedule, pp, mesh.pp_rank) if pp > 1 else [0]
    stages = [
        _stage(build, number, config, mesh, precision, divided_loss=divided_loss, warns=i == 0)
        for i, number in enumerate(numbers)
    ]
    check_arguments(stages[0].inputs, arguments)
    wrapped = _wrapped(stages, config, mesh, precision, divided_loss=divided_loss)
    wrapped.settings, wrapped.summary = stages[0].settings, stages[0].summary
    _check_trained(wrapped, mesh)
    return wrapped


def _check_trained(model: ParallelModel, mesh: Mesh) -> None:
    """Raise a ConfigError if nothing is trained; a single stage of a pipeline may be frozen."""
    trained = torch.tensor(float(len(model.parameters)), device=mesh.device)
    if mesh.degrees.pp > 1:
        mesh.add(trained)
    if not trained:
        raise ConfigError(
            "no parameter is left to be trained: optimizer.groups freezes them, train.lora trains "
            "only adapters and what train.lora.also names, or the model's own requires_grad is "
            "False"
        )


def _with_adapters(build: Build, lora: LoRAConfig) -> nn.Module:
    model = build()
    add_adapters(model, lora.patterns, lora.rank, lora.alpha, lora.dropout)
    check_trained(model, lora.also)
    return model


def _stage(
    build: Build,
    number: int,
    config: Config,
    mesh: Mesh,
    precision: Precision,
    *,
    divided_loss: bool,
    warns: bool,
) -> _Stage:
    """Return what this rank has of a stage. Without a pipeline the model is one stage."""
    parallel, train, degrees = config.parallel, config.train, mesh.degrees
    device, whole = precision.device, _is_whole(config, mesh)
    storage = torch.device("cpu") if parallel.fsdp.offload else device
    # Rank 0 cannot send what it does not have, so a stage of a pipeline is built by its own ranks.
    model, values = begin(build, config.seed, from_rank_0=not whole and degrees.pp == 1)
    check_layers(model)
    cast_parameters(model, precision.params)
    prepare_modes(model, says=warns)
    if warns:
        prepare_batch_norms(model, config, mesh)
    plan, names = Plan(), list[str]()
    if degrees.ranks > degrees.dp or parallel.ep > 1:
        plan = find_plan(model, parallel, degrees)
    if not whole or train.activation_checkpointing != "none" or train.compile == "blocks":
        names = [name for name, _ in find_blocks(model, parallel.blocks)]
    layers = float8_layers(model, parallel.blocks) if precision.compute == "fp8" else []
    chosen = settings(model, config.optimizer, parallel.blocks)
    if train.lora.patterns:
        freeze_base(model, train.lora.also)
    freeze(model, chosen)
    summary = ModelSummary.of(model, parallel.blocks)
    inputs, loads = list(inspect.signature(model.forward).parameters), load_sizes(model)
    counts: list[int] = []
    if degrees.pp > 1:
        counts = block_counts(model, plan, parallel, degrees.pp)
        _cut(model, plan, counts, number, mesh, parallel)
    if values == "built":
        model.to(storage)
        share(model, mesh.stage_group)  # replicas may have drawn other values
    if degrees.tp > 1:
        _check_compile(config, device)
        divide_layers(
            *(model, plan, mesh.tp_mesh, parallel), loss_parallel=divided_loss, cp=degrees.cp
        )
    if mesh.sequence_part is not None:
        model.context = mesh.sequence_part  # type: ignore[assignment]
    experts = divide_experts(model, plan, mesh, parallel.ep)
    if layers:
        compute_in_float8(model, layers)
    blocks = list(present(model, names))
    checkpoint_activations(
        *(blocks, train.activation_checkpointing, train.activation_checkpointing_every),
        compiled=train.compile != "off",
    )
    if train.compile == "off":  # torch refuses by itself what is compiled
        second_gradients.refuse(blocks, mesh)
    _compile(model, blocks, train.compile)
    if not whole and (mesh.dp_cp_size > 1 or parallel.fsdp.offload):
        shard(model, blocks, mesh, precision, parallel, experts)
    fill(model, values, build, config.seed, device, storage, mesh.stage_group)
    return _Stage(model, inputs, counts, loads, chosen, summary)


def _is_whole(config: Config, mesh: Mesh) -> bool:
    """Return whether each rank has the whole model, and all of its gradients."""
    degrees, parallel = mesh.degrees, config.parallel
    divided = degrees.ranks > degrees.dp_replicate or parallel.fsdp.offload or parallel.ep > 1
    return not divided


def _cut(
    model: nn.Module,
    plan: Plan,
    counts: list[int],
    number: int,
    mesh: Mesh,
    parallel: ParallelConfig,
) -> None:
    """Leave only the modules of a stage, and tell it how long a part of a sequence is."""
    cut(model, plan, counts, number)
    if number > 0 and hasattr(model, "sequence_parts"):
        tp = mesh.degrees.tp if sequence_is_divided(plan, parallel) else 1
        setattr(model, "sequence_parts", mesh.degrees.cp * tp)  # noqa: B010 (mypy)


def _check_compile(config: Config, device: torch.device) -> None:
    """Raise a ConfigError where the compiler cannot have tensor parallel; prepare `async_tp`."""
    if device.type == "cpu" and config.train.compile != "off":
        raise ConfigError(
            f"train.compile={config.train.compile} with parallel.tp={config.parallel.tp} on CPUs: "
            "torch fails; use train.compile=off"
        )
    if config.parallel.async_tp:
        if device.type == "cpu":
            raise ConfigError("parallel.async_tp=true: it needs GPUs, but this rank has none")
        torch._inductor.config._micro_pipeline_tp = True


def _compile(model: nn.Module, blocks: list[nn.Module], what: str) -> None:
    if what != "off":
        compute_eagerly(model)
    for module in {"off": [], "blocks": blocks, "model": [model]}[what]:
        module.compile()


def _wrapped(
    stages: list[_Stage], config: Config, mesh: Mesh, precision: Precision, *, divided_loss: bool
) -> ParallelModel:
    """Return the wrapper in which the ranks share the work of a step."""
    parallel, train, degrees = config.parallel, config.train, mesh.degrees
    accumulate = BatchSizes.of(config, degrees).accumulate * mesh.weight
    module = stages[0].module
    if degrees.pp > 1:
        return _pipeline(stages, config, mesh, precision, accumulate, divided_loss=divided_loss)
    if mesh.dp_cp_size == 1 and not parallel.fsdp.offload:
        return ParallelModel(module, mesh, precision, accumulate, divided_loss=divided_loss)
    if not _is_whole(config, mesh):
        sharded = degrees.dp_shard > 1 or parallel.fsdp.offload
        every = parallel.sync == "every" or (
            sharded and parallel.sync == "auto" and parallel.zero > 1
        )
        return FSDPModel(
            *(module, mesh, precision, accumulate),
            zero=parallel.zero,
            every=every,
            divided_loss=divided_loss,
            agree=parallel.fsdp.agree,
        )
    if train.local_sgd.every is not None:
        return LocalSGDModel(module, mesh, precision, accumulate, parallel.ddp, train.local_sgd)
    return DDPModel(
        *(module, mesh, precision, accumulate, parallel.ddp),
        compress=train.compression,
        every=parallel.sync == "every",
    )


def _pipeline(
    stages: list[_Stage],
    config: Config,
    mesh: Mesh,
    precision: Precision,
    accumulate: int,
    *,
    divided_loss: bool,
) -> PipelineModel:
    schedule = config.parallel.pipeline.schedule
    first = stages[0]
    if dist.get_rank() == 0:
        log.info(
            "pipeline %s: stages of %s blocks, %d micro-batches, expected bubble %.1f%%",
            *(schedule, " + ".join(map(str, first.counts)), accumulate),
            100 * bubble(schedule, mesh.degrees.pp, accumulate),
        )
    pipeline = PipelineModel(
        [stage.module for stage in stages],
        *(mesh, precision, accumulate),
        schedule=schedule,
        inputs=first.inputs,
        divided_loss=divided_loss,
    )
    pipeline.loads = Loads(pipeline.module, first.loads)
    return pipeline
