"""Models in a loop of one's own, which calls the modules and `backward` itself.

    model = spread(module, ...)       module = model.module is called: module(x), loss.backward()
    follow(optimizer, [model, ...])   once for each optimizer
    model.begin_step()                before each step of the loop

Gradients are means over the ranks, as those of DDP and FSDP: a loss is a mean over the rows of a
rank, and all ranks have as many. They are complete when `backward` returns, so they can be clipped.
One process may have several models; all ranks call them in one order.
"""

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from hpctrain.base.errors import ConfigError
from hpctrain.config.rules.own_loop import layout_problems
from hpctrain.config.schema import OptimizerConfig, ParallelConfig, TrainConfig
from hpctrain.engine.layers.dry_run import same_modes
from hpctrain.engine.parallel.mesh import Mesh
from hpctrain.engine.parallel.precision import Precision
from hpctrain.engine.parallel.recipe import parallelize
from hpctrain.engine.parallel.setup import Build, Training
from hpctrain.engine.parallel.wrappers.fsdp import FSDPModel
from hpctrain.engine.parallel.wrappers.parallel_model import ParallelModel


def spread(
    module: nn.Module | Build,
    parallel: ParallelConfig,
    mesh: Mesh,
    precision: Precision,
    *,
    seed: int = 0,
) -> ParallelModel:
    """Spread a module over data-parallel ranks; all ranks call this together.

    A module that every rank has built gets the values of rank 0, and its parts stay in training or
    evaluation mode. What a function builds is drawn from `seed`, without the memory of the whole
    model on any rank if it is a `hpctrain.models.Model`. Its parameters are those of
    `model.module`, to be given to optimizers. What the module returns in bf16 is converted to fp32.

    Raises a ConfigError for a layout other than ddp, zero and hsdp, and for fp16.
    """
    if problems := [*layout_problems(parallel, precision.compute)]:
        raise ConfigError(problems[0])
    training = Training(TrainConfig(), OptimizerConfig(), seed, ours=False)
    with same_modes(module) if isinstance(module, nn.Module) else nullcontext():
        model = parallelize(module, parallel, mesh, precision, training)
    # An optimizer may have frozen parameters, too.
    named = [*model.module.named_parameters()]
    if len(named) > len(model.parameters):
        model.names, model.parameters = [n for n, _ in named], [p for _, p in named]
    if isinstance(model, FSDPModel):
        model.serve_calls()
    if precision.autocast is not None:
        root: Any = model.module
        root.forward = partial(_autocast, precision, root.forward)
    return model


def follow(optimizer: torch.optim.Optimizer, models: Iterable[ParallelModel]) -> None:
    """Let models do what is due around each step of an optimizer, which has parameters of theirs.

    Raises a ConfigError if it has a parameter of none of them.
    """
    held = {id(p): p for group in optimizer.param_groups for p in group["params"]}
    for model in models:
        if own := [held.pop(id(p)) for p in model.parameters if id(p) in held]:
            optimizer.register_step_pre_hook(partial(_before, model, own))
            optimizer.register_step_post_hook(partial(_after, model))
    if held:
        shape = tuple(next(iter(held.values())).shape)
        raise ConfigError(
            f"the optimizer {type(optimizer).__name__} has {len(held)} parameters of no model of "
            f"the session, the first of shape {shape}: make it from the parameters of what "
            "session.model returns, and put single parameters into a module"
        )


def _before(model: ParallelModel, own: list[nn.Parameter], *_: Any) -> None:
    model.before_update(own)


def _after(model: ParallelModel, *_: Any) -> None:
    model.free_gathered()


def _autocast(precision: Precision, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with precision.forward():
        outputs = forward(*args, **kwargs)
    return tree_map(_widened, outputs)


def _widened(value: Any) -> Any:
    half = isinstance(value, torch.Tensor) and value.dtype == torch.bfloat16
    return value.float() if half else value
