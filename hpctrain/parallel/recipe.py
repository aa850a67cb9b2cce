"""The recipe: one function turns a model into the model that is trained.

    build ── precision ── stages ── tensor, context and expert parallel ── activation checkpointing
        └── compile ── DDP, replicas or FSDP2 ── initial parameters

The order matters: what is compiled contains the checkpointing, and what is sharded is compiled.
"""

from __future__ import annotations

import inspect
import logging

import torch
import torch.distributed as dist
from torch import nn

from hpctrain.config.rules.batch_sizes import BatchSizes
from hpctrain.config.rules.pipeline_schedule import bubble
from hpctrain.config.schema import Config
from hpctrain.errors import ConfigError
from hpctrain.models.plan import Plan
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
from hpctrain.parallel.preparing.initial import (
    Build,
    Initializes,
    build_as_usual,
    build_whole,
    cast_parameters,
    fill_from_rank_0,
    fill_modules,
    share,
    skeleton,
    to_device,
)
from hpctrain.parallel.reducing.expert_loads import Loads, compute_eagerly, load_sizes
from hpctrain.parallel.wrappers.ddp import DDPModel
from hpctrain.parallel.wrappers.fsdp import FSDPModel, shard
from hpctrain.parallel.wrappers.local_sgd import LocalSGDModel
from hpctrain.parallel.wrappers.parallel_model import ParallelModel
from hpctrain.parallel.wrappers.pipeline import PipelineModel

log = logging.getLogger(__name__)


def parallelize(
    build: Build, config: Config, mesh: Mesh, precision: Precision, *, loss_parallel: bool = False
) -> ParallelModel:
    """Build the model and spread it over the ranks; all ranks call this together.

    Args:
        build: Returns a new model. It is called on the meta device, too.
        config: `parallel`, `train` and `seed` are read.
        mesh: The ranks.
        precision: The number formats.
        loss_parallel: Whether the task computes the loss from logits that tensor parallel divides.

    Raises:
        ConfigError: The model has no blocks that could be found, or no plan, but needs them.
    """
    parallel, degrees = config.parallel, mesh.degrees
    accumulate = BatchSizes.of(config, degrees).accumulate * mesh.weight
    if degrees.pp > 1:
        return _pipeline(build, config, mesh, precision, loss_parallel=loss_parallel)
    if degrees.ranks > degrees.dp_replicate or parallel.fsdp.offload or parallel.ep > 1:
        divided_loss = loss_parallel and parallel.loss_parallel and degrees.tp > 1
        module = _divided(build, config, mesh, precision, divided_loss=divided_loss)
        if mesh.dp_cp_size == 1 and not parallel.fsdp.offload:
            return ParallelModel(module, mesh, precision, accumulate, divided_loss=divided_loss)
        sharded = degrees.dp_shard > 1 or parallel.fsdp.offload
        every = parallel.sync == "every" or (
            sharded and parallel.sync == "auto" and parallel.zero > 1
        )
        return FSDPModel(
            module,
            mesh,
            precision,
            accumulate,
            zero=parallel.zero,
            every=every,
            divided_loss=divided_loss,
            agree=parallel.fsdp.agree,
        )
    module = build_whole(build, config.seed, precision.params, precision.device, mesh.stage_group)
    prepare_batch_norms(module, config, mesh)
    train, names = config.train, []
    if train.activation_checkpointing != "none" or train.compile == "blocks":
        names = [name for name, _ in find_blocks(module, parallel.blocks)]
    if layers := _float8(module, config, precision):
        compute_in_float8(module, layers)
    _prepare(module, list(present(module, names)), config)
    if degrees.dp_replicate == 1:
        return ParallelModel(module, mesh, precision, accumulate)
    local = config.train.local_sgd
    if local.every is not None:
        return LocalSGDModel(module, mesh, precision, accumulate, parallel.ddp, local)
    compress, every = config.train.compression, parallel.sync == "every"
    return DDPModel(
        module, mesh, precision, accumulate, parallel.ddp, compress=compress, every=every
    )


def _divided(
    build: Build, config: Config, mesh: Mesh, precision: Precision, *, divided_loss: bool
) -> nn.Module:
    """Return the model of which each rank has a part, or whose gradients FSDP2 reduces."""
    device, seed = precision.device, config.seed
    model = skeleton(build, seed)
    meta = model is not None
    if model is None:
        model = build_as_usual(build, seed, precision.params, device)
        share(model, mesh.stage_group)
    cast_parameters(model, precision.params)
    prepare_batch_norms(model, config, mesh)
    plan = Plan()
    if mesh.degrees.ranks > mesh.degrees.dp or config.parallel.ep > 1:
        plan = find_plan(model, config.parallel, mesh.degrees)
    names = [name for name, _ in find_blocks(model, config.parallel.blocks)]
    layers = _float8(model, config, precision)
    _spread(model, plan, names, layers, config, mesh, precision, divided_loss=divided_loss)
    storage = torch.device("cpu") if config.parallel.fsdp.offload else device
    if meta and isinstance(model, Initializes):
        fill_modules(model, build, seed, device, storage, mesh.stage_group)
    elif meta:
        fill_from_rank_0(model, build, seed, device, storage)
    return model


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


def _pipeline(
    build: Build, config: Config, mesh: Mesh, precision: Precision, *, loss_parallel: bool
) -> PipelineModel:
    """Return the stages of this rank."""
    device, seed, parallel = precision.device, config.seed, config.parallel
    schedule, pp = parallel.pipeline.schedule, mesh.degrees.pp
    divided_loss = loss_parallel and parallel.loss_parallel and mesh.degrees.tp > 1
    storage = torch.device("cpu") if parallel.fsdp.offload else device
    stages: list[nn.Module] = []
    for number in numbers_of(schedule, pp, mesh.pp_rank):
        model = skeleton(build, seed)
        # Any other model is built on every rank: rank 0 cannot send what its stages do not have.
        meta = model is not None and isinstance(model, Initializes)
        if model is None or not meta:
            model = build_as_usual(build, seed, precision.params, torch.device("cpu"))
        cast_parameters(model, precision.params)
        if not stages:
            prepare_batch_norms(model, config, mesh)
        plan = find_plan(model, parallel, mesh.degrees)
        names = [name for name, _ in find_blocks(model, parallel.blocks)]
        layers = _float8(model, config, precision)
        inputs = list(inspect.signature(model.forward).parameters)
        counts, sizes = block_counts(model, plan, parallel, pp), load_sizes(model)
        cut(model, plan, counts, number)
        if number > 0 and hasattr(model, "sequence_parts"):
            tp = mesh.degrees.tp if sequence_is_divided(plan, parallel) else 1
            setattr(model, "sequence_parts", mesh.degrees.cp * tp)  # noqa: B010 (mypy)
        if not meta:
            model.to(storage)
            share(model, mesh.stage_group)
        _spread(model, plan, names, layers, config, mesh, precision, divided_loss=divided_loss)
        if meta:
            fill_modules(model, build, seed, device, storage, mesh.stage_group)
        to_device(model, device)
        stages.append(model)
    accumulate = BatchSizes.of(config, mesh.degrees).accumulate
    if dist.get_rank() == 0:
        log.info(
            "pipeline %s: stages of %s blocks, %d micro-batches, expected bubble %.1f%%",
            *(schedule, " + ".join(map(str, counts)), accumulate),
            100 * bubble(schedule, pp, accumulate),
        )
    pipeline = PipelineModel(
        stages,
        mesh,
        precision,
        accumulate,
        schedule=schedule,
        inputs=inputs,
        divided_loss=divided_loss,
    )
    pipeline.loads = Loads(pipeline.module, sizes)
    return pipeline


def _spread(
    model: nn.Module,
    plan: Plan,
    names: list[str],
    layers: list[str],
    config: Config,
    mesh: Mesh,
    precision: Precision,
    *,
    divided_loss: bool,
) -> None:
    """Divide a model, or a stage of one, over the ranks that have it, in place.

    Args:
        model: The model or the stage.
        plan: The plan of the model.
        names: The names of the model's blocks.
        layers: The names of the linear layers that compute in float8.
        config: The config.
        mesh: The ranks.
        precision: The number formats.
        divided_loss: Whether the logits stay divided by the vocabulary.
    """
    if mesh.degrees.tp > 1:
        _check_compile(config, precision.device)
        divide_layers(
            *(model, plan, mesh.tp_mesh, config.parallel),
            loss_parallel=divided_loss,
            cp=mesh.degrees.cp,
        )
    if mesh.sequence_part is not None:
        model.context = mesh.sequence_part  # type: ignore[assignment]
    experts = divide_experts(model, plan, mesh, config.parallel.ep)
    if layers:
        compute_in_float8(model, layers)
    blocks = list(present(model, names))
    _prepare(model, blocks, config)
    if mesh.dp_cp_size > 1 or config.parallel.fsdp.offload:
        shard(model, blocks, mesh, precision, config.parallel, experts)


def _float8(model: nn.Module, config: Config, precision: Precision) -> list[str]:
    """Return the names of the linear layers of a whole model that compute in float8."""
    if precision.compute != "fp8":
        return []
    return float8_layers(model, config.parallel.blocks)


def _prepare(model: nn.Module, blocks: list[nn.Module], config: Config) -> None:
    """Apply what does not depend on the mesh, in place."""
    train = config.train
    checkpoint_activations(
        blocks, train.activation_checkpointing, train.activation_checkpointing_every
    )
    if train.compile != "off":
        compute_eagerly(model)
    if train.compile == "blocks":
        for block in blocks:
            block.compile()
    elif train.compile == "model":
        model.compile()
