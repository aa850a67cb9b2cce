"""The recipe: one function turns a model into the model that is trained.

    for each stage:  begin ── cast ── freeze ── change ── fill with the initial values
    change:          plan ── cut ── tp ── cp ── ep ── float8 ── checkpointing ── compile ── shard
    then wrap:       ParallelModel, DDPModel, LocalSGDModel, FSDPModel or PipelineModel

A model without a pipeline is one stage. What only some layouts or models need is imported for them
alone.
"""

import inspect
from typing import NamedTuple

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from hpctrain.config.schema import ParallelConfig
from hpctrain.engine.parallel.mesh import Mesh
from hpctrain.engine.parallel.precision import Precision
from hpctrain.engine.parallel.preparing.initial import begin, fill, place
from hpctrain.engine.parallel.preparing.summary import ModelSummary
from hpctrain.engine.parallel.preparing.whole_model import (
    Setting,
    cast_parameters,
    check_layers,
    freeze,
    prepare_modes,
)
from hpctrain.engine.parallel.setup import Build, Setup, Training
from hpctrain.engine.parallel.wrappers.parallel_model import ParallelModel
from hpctrain.engine.tasks.task import check_arguments


class _BuiltStage(NamedTuple):
    """A model that is ready to be wrapped, or one stage of it.

    `loads` are the numbers of experts of the modules that have some; these, the settings and the
    summary are those of the whole model.
    """

    module: nn.Module
    inputs: list[str]
    loads: dict[str, int]
    settings: dict[str, Setting]
    summary: ModelSummary


def parallelize(
    build: Build, parallel: ParallelConfig, mesh: Mesh, precision: Precision, training: Training
) -> ParallelModel:
    """Build the model and spread it over the ranks; all ranks call this together.

    `build` is called on the meta device, too; or it is a module that every rank has built, which
    gets the values of rank 0.
    """
    setup = Setup(build, parallel, mesh, precision, training)
    stage = _stage(setup, mesh.pp_rank)
    wrapped = _wrapped(setup, stage) if mesh.degrees.pp == 1 else _pipeline(setup, stage)
    wrapped.settings, wrapped.summary = stage.settings, stage.summary
    if stage.loads:
        from hpctrain.engine.parallel.reducing.expert_loads import Loads

        whole = stage.module if mesh.degrees.pp == 1 else wrapped.module
        wrapped.loads = Loads(whole, stage.loads)
    return wrapped


def _stage(setup: Setup, number: int) -> _BuiltStage:
    """Return what this rank has of a stage. Without a pipeline the model is one stage.

    What holds for the whole model is done and said with the first stage of this rank.
    """
    training, parallel, train, mesh = setup.training, setup.parallel, setup.train, setup.mesh
    first = number == mesh.pp_rank
    model, values = begin(setup)
    check_layers(model)
    cast_parameters(model, setup.precision.params)
    prepare_modes(model, says=first)
    modules = dict(model.named_modules())
    if first and any(isinstance(module, _NormBase) for module in modules.values()):
        from hpctrain.engine.parallel.preparing.batch_norm import prepare_batch_norms

        prepare_batch_norms(model, mesh, training)
    chosen: dict[str, Setting] = {}
    if training.ours:
        chosen = freeze(model, training.optimizer, parallel.blocks, train.lora)
    summary = ModelSummary.of(model)
    loads = {n: vars(m)["experts"] for n, m in modules.items() if hasattr(m, "take_loads")}
    inputs = list(inspect.signature(model.forward).parameters)
    check_arguments(inputs, training.arguments)
    if setup.changes:
        from hpctrain.engine.parallel.changes import change

        change(setup, model, number, values)
    elif values == "built":
        place(setup, model)
    fill(setup, model, values)
    return _BuiltStage(model, inputs, loads, chosen, summary)


def _pipeline(setup: Setup, first: _BuiltStage) -> ParallelModel:
    """Return the stages of this rank with their schedule."""
    from hpctrain.engine.parallel.dividing.stages import numbers_of
    from hpctrain.engine.parallel.wrappers.pipeline import PipelineModel

    mesh, schedule = setup.mesh, setup.parallel.pipeline.schedule
    _, *others = numbers_of(schedule, mesh.degrees.pp, mesh.pp_rank)
    stages = [first, *(_stage(setup, number) for number in others)]
    return PipelineModel([stage.module for stage in stages], first.inputs, setup)


def _wrapped(setup: Setup, stage: _BuiltStage) -> ParallelModel:
    """Return the wrapper in which the ranks share the work of a step."""
    module, alone = stage.module, setup.mesh.dp_cp_size == 1 and not setup.parallel.fsdp.offload
    if alone or (setup.whole and not any(p.requires_grad for p in module.parameters())):
        return ParallelModel(module, setup)
    return _of_ranks(setup, module)


def _of_ranks(setup: Setup, module: nn.Module) -> ParallelModel:
    """Return the wrapper of a model whose gradients several ranks have."""
    if not setup.whole:
        from hpctrain.engine.parallel.wrappers.fsdp import FSDPModel

        return FSDPModel(module, setup)
    from hpctrain.engine.parallel.wrappers.ddp import DDPModel, LocalSGDModel

    replicas = DDPModel if setup.train.local_sgd.every is None else LocalSGDModel
    return replicas(module, setup)
