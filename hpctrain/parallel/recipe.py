"""The recipe: one function turns a model into the model that is trained.

    build ── precision ── tensor parallel ── activation checkpointing ── compile
                                                └── DDP, replicas or FSDP2 ── initial parameters

The order matters: what is compiled contains the checkpointing, and what is sharded is compiled.
"""

from __future__ import annotations

import logging

import torch
from torch import nn

from hpctrain.config.micro_batches import accumulate as micro_batches
from hpctrain.config.schema import Config
from hpctrain.errors import ConfigError
from hpctrain.parallel.activation import checkpoint_activations
from hpctrain.parallel.blocks import find_blocks
from hpctrain.parallel.ddp import DDPModel
from hpctrain.parallel.float8 import compute_in_float8
from hpctrain.parallel.fsdp import FSDPModel, shard
from hpctrain.parallel.initial import (
    Build,
    Initializes,
    build_whole,
    cast_parameters,
    fill_from_rank_0,
    fill_modules,
    skeleton,
)
from hpctrain.parallel.local_sgd import LocalSGDModel
from hpctrain.parallel.mesh import Mesh
from hpctrain.parallel.model import ParallelModel
from hpctrain.parallel.plan import find_plan
from hpctrain.parallel.precision import Precision
from hpctrain.parallel.tensor import divide_layers

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
    accumulate = micro_batches(config.train, mesh.shares) * mesh.weight
    if degrees.ranks > degrees.dp_replicate or parallel.fsdp.offload:
        divided_loss = loss_parallel and parallel.loss_parallel and degrees.tp > 1
        module = _divided(build, config, mesh, precision, divided_loss=divided_loss)
        if mesh.averaged == 1 and not parallel.fsdp.offload:
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
        )
    module = build_whole(build, config.seed, precision.params, precision.device)
    _prepare(module, config, precision, need_blocks=False)
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
    device, seed, parallel = precision.device, config.seed, config.parallel
    storage = torch.device("cpu") if parallel.fsdp.offload else device
    model = skeleton(build, seed)
    meta = model is not None
    if model is None:
        model = build_whole(build, seed, precision.params, device)
    cast_parameters(model, precision.params)
    if mesh.degrees.ranks > mesh.degrees.dp:
        plan = find_plan(model, parallel, mesh.degrees)
        if mesh.degrees.tp > 1:
            _check_compile(config, device)
            divide_layers(model, plan, mesh.tensor, parallel, loss_parallel=divided_loss)
    blocks = _prepare(model, config, precision, need_blocks=True)
    if mesh.averaged > 1 or parallel.fsdp.offload:
        shard(model, blocks, mesh, precision, parallel)
    if meta and isinstance(model, Initializes):
        fill_modules(model, seed, device, storage)
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


def _prepare(
    model: nn.Module, config: Config, precision: Precision, *, need_blocks: bool
) -> list[nn.Module]:
    """Apply what does not depend on the mesh, in place; return the blocks."""
    train = config.train
    by_block = train.activation_checkpointing != "none" or train.compile == "blocks"
    blocks = []
    if need_blocks or by_block:
        blocks = [block for _, block in find_blocks(model, config.parallel.blocks)]
    if precision.compute == "fp8":
        compute_in_float8(model)
    checkpoint_activations(
        blocks, train.activation_checkpointing, train.activation_checkpointing_every
    )
    if train.compile == "blocks":
        for block in blocks:
            block.compile()
    elif train.compile == "model":
        model.compile()
    return blocks
