"""The recipe: one function turns a model into the model that is trained.

    for each stage:  begin ── cast ── freeze ── change ── fill with the initial values
    change:          plan ── cut ── tp ── cp ── ep ── float8 ── checkpointing ── compile ── shard
    then wrap:       ParallelModel, DDPModel, LocalSGDModel, FSDPModel or PipelineModel

A model without a pipeline is one stage. What only some layouts need is imported for them alone.
"""

import inspect

import torch
from torch import nn

from hpctrain.config.schema import ParallelConfig
from hpctrain.engine.parallel.mesh import Mesh
from hpctrain.engine.parallel.precision import Precision
from hpctrain.engine.parallel.preparing.batch_norm import prepare_batch_norms
from hpctrain.engine.parallel.preparing.blocks import ModelSummary
from hpctrain.engine.parallel.preparing.initial import Build, begin, fill, place
from hpctrain.engine.parallel.preparing.whole_model import (
    Setting,
    cast_parameters,
    check_layers,
    freeze,
    prepare_modes,
)
from hpctrain.engine.parallel.reducing.expert_loads import load_sizes
from hpctrain.engine.parallel.setup import BuiltStage, Setup, Training
from hpctrain.engine.parallel.wrappers.parallel_model import ParallelModel
from hpctrain.engine.tasks.task import check_arguments


def parallelize(
    build: Build, parallel: ParallelConfig, mesh: Mesh, precision: Precision, training: Training
) -> ParallelModel:
    """Build the model and spread it over the ranks; all ranks call this together.

    `build` is called on the meta device, too; or it is a module that every rank has built, which
    gets the values of rank 0.
    """
    setup = Setup(build, parallel, mesh, precision, training)
    if (pp := mesh.degrees.pp) > 1:
        from hpctrain.engine.parallel.changes import pipeline
        from hpctrain.engine.parallel.dividing.stages import numbers_of

        numbers = numbers_of(parallel.pipeline.schedule, pp, mesh.pp_rank)
        stages = [_stage(setup, number, first=i == 0) for i, number in enumerate(numbers)]
        return stages[0].known(pipeline(setup, stages))
    stage = _stage(setup, 0, first=True)
    return stage.known(_wrapped(setup, stage.module))


def _stage(setup: Setup, number: int, *, first: bool) -> BuiltStage:
    """Return what this rank has of a stage. Without a pipeline the model is one stage.

    What holds for the whole model is done and said with the `first` stage of this rank.
    """
    training, parallel, train, mesh = setup.training, setup.parallel, setup.train, setup.mesh
    device = setup.precision.device
    storage = torch.device("cpu") if parallel.fsdp.offload else device
    # Rank 0 cannot send what it does not have, so the ranks of a stage build it themselves.
    from_rank_0 = not setup.whole and mesh.degrees.pp == 1
    model, values = begin(setup.build, training.seed, from_rank_0=from_rank_0)
    check_layers(model)
    cast_parameters(model, setup.precision.params)
    prepare_modes(model, says=first)
    if first:
        advice = setup.accumulate, training.norm, training.may_sync
        prepare_batch_norms(model, mesh, train, *advice, trains=training.says)
    chosen: dict[str, Setting] = {}
    if training.ours:
        chosen = freeze(model, training.optimizer, parallel.blocks, train.lora)
    summary = ModelSummary.of(model, parallel.blocks)
    inputs, loads = list(inspect.signature(model.forward).parameters), load_sizes(model)
    check_arguments(inputs, training.arguments)
    counts: list[int] = []
    if setup.changes:
        from hpctrain.engine.parallel.changes import change

        counts = change(setup, model, number, values, storage)
    else:
        place(model, values, storage, mesh.stage_group)
    fill(model, values, setup.build, training.seed, device, storage, mesh.stage_group)
    return BuiltStage(model, inputs, counts, loads, chosen, summary)


def _wrapped(setup: Setup, module: nn.Module) -> ParallelModel:
    """Return the wrapper in which the ranks share the work of a step."""
    held = module, setup.mesh, setup.precision, setup.accumulate
    alone = setup.mesh.dp_cp_size == 1 and not setup.parallel.fsdp.offload
    if alone or (setup.whole and not any(p.requires_grad for p in module.parameters())):
        return ParallelModel(*held, divided_loss=setup.divided_loss)
    if not setup.whole:
        from hpctrain.engine.parallel.wrappers.fsdp import FSDPModel

        return FSDPModel(*held, setup.parallel, divided_loss=setup.divided_loss)
    from hpctrain.engine.parallel.wrappers.ddp import DDPModel, LocalSGDModel

    replicas = DDPModel if setup.train.local_sgd.every is None else LocalSGDModel
    return replicas(*held, setup.parallel, setup.train)
