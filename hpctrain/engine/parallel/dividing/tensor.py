"""Tensor parallel: the ranks of a group divide every layer, by the plan of the model.

    x, a part of the sequence ── norm ──┬─ gather ── colwise ── rowwise ── reduce and scatter ─┐
    └───────────────────────────────────┘                                                      +

Without sequence parallel every rank has all of x; gather does nothing then, and the end adds up.
The styles are those of torch (`torch.distributed.tensor.parallel`), which follow Megatron-LM
(Shoeybi et al. 2019; Korthikanti et al. 2022).
"""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from hpctrain.base.errors import ConfigError
from hpctrain.config.rules.degrees import length_problem
from hpctrain.config.schema import ParallelConfig
from hpctrain.engine.layers.lora import Adapted, adapted
from hpctrain.engine.layers.plan import Plan
from hpctrain.engine.layers.ties import tie, ties
from hpctrain.engine.parallel.dividing.chosen_plan import matching
from hpctrain.engine.parallel.dividing.stages import Absent
from hpctrain.engine.parallel.mesh import Mesh


def divide_layers(
    model: nn.Module, plan: Plan, mesh: Mesh, config: ParallelConfig, *, loss_parallel: bool
) -> None:
    """Divide the modules that the plan names, in place.

    The model is on the meta device or equal on all ranks. With `loss_parallel` the logits stay
    divided by their last dimension.
    """
    shared, cp, tp = list(ties(model)), mesh.degrees.cp, mesh.degrees.tp
    divided = sequence_is_divided(plan, config)
    between: Placement = Shard(1) if divided else Replicate()
    styles: dict[str, ParallelStyle] = {
        "colwise": ColwiseParallel(),
        "rowwise": RowwiseParallel(output_layouts=between),
        "embedding_rowwise": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
        "colwise_gather_output": ColwiseParallel(
            input_layouts=between,
            output_layouts=Shard(-1) if loss_parallel else Replicate(),
            use_local_output=not loss_parallel,
        ),
        "gather_sequence": _WholeInput(between),
    }
    if divided:
        styles["sequence_parallel"] = SequenceParallel(use_local_output=True)
        styles["experts"] = _OwnTokens()
    chosen = {
        name: _OwnDropout() if divided and isinstance(module, nn.Dropout) else styles[style]
        for pattern, style in plan.tensor.items()
        for name, module in matching(model, pattern)
        if style in styles and not isinstance(module, Absent)
    }
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    parallelize_module(model, mesh.tp_mesh, chosen, src_data_rank=None)
    for _, layer in adapted(model):
        _divide_adapter(layer, mesh.tp_mesh)
    for first, others in shared:  # torch has made two parameters of what was one
        tie(model, first, others)
    for name in frozen:  # torch has made new parameters of those between divided layers
        model.get_parameter(name).requires_grad_(False)
    if divided:
        model.register_forward_pre_hook(partial(_check_length, cp, tp), with_kwargs=True)


def _divide_adapter(layer: Adapted, mesh: DeviceMesh) -> None:
    """Let the adapter of a divided layer be divided, too; torch has done it for columns only."""
    weight = layer.weight
    if not isinstance(weight, DTensor) or isinstance(layer.lora_A, DTensor):
        return
    inputs: Placement = Shard(1) if weight.placements[0].is_shard(1) else Replicate()
    for key, placement in (("lora_A", inputs), ("lora_B", Replicate())):
        whole = getattr(layer, key).data
        part = distribute_tensor(whole, mesh, [placement], src_data_rank=None)
        setattr(layer, key, nn.Parameter(part))


def sequence_is_divided(plan: Plan, config: ParallelConfig) -> bool:
    """Return whether the sequence is divided outside of attention and MLP."""
    return config.sequence_parallel and "sequence_parallel" in plan.tensor.values()


class _WholeInput(ParallelStyle):
    """Every rank has the first input whole; the layers share one reduction of its gradient."""

    def __init__(self, layout: Placement) -> None:
        super().__init__()
        self.layout = layout

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def gather(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            x = DTensor.from_local(args[0], device_mesh, [self.layout], run_check=False)
            return (x.redistribute(placements=[Replicate()]), *args[1:])

        module.register_forward_pre_hook(gather)
        return module


class _OwnTokens(ParallelStyle):
    """Every rank has all parameters of a module, whose gradients are added up after the step."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for key, parameter in list(module.named_parameters(recurse=False)):
            same = distribute_tensor(parameter.data, device_mesh, [Replicate()], src_data_rank=None)
            setattr(module, key, nn.Parameter(same, parameter.requires_grad))
        return module


class _OwnDropout(ParallelStyle):
    """The ranks, whose random streams are equal, drop by their part of one mask."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, nn.Dropout)
        parts, number = device_mesh.size(), device_mesh.get_local_rank()
        probability = module.p

        def forward(x: torch.Tensor) -> torch.Tensor:
            if not module.training or not probability:
                return x
            whole = x.new_ones(x.shape[0], x.shape[1] * parts, *x.shape[2:])
            mask = F.dropout(whole, probability).chunk(parts, 1)[number]
            # Autograd keeps the mask; a view of one part would keep all parts in memory.
            return x * mask.clone()

        setattr(module, "forward", forward)  # noqa: B010 (mypy)
        return module


def _check_length(cp: int, tp: int, module: nn.Module, args: tuple[Any, ...], kwargs: Any) -> None:
    tokens = args[0]
    if not isinstance(tokens, torch.Tensor) or tokens.is_floating_point():
        return
    if problem := length_problem(tokens.shape[1], cp, tp):
        raise ConfigError(problem)


def whole_gradients(parameters: list[nn.Parameter]) -> None:
    """Add up gradients of which each rank of a group has a summand, in one reduction, in place.

    Norms between divided layers have such gradients: each rank has seen a part of the sequence.
    """
    by_mesh: dict[DeviceMesh, list[tuple[nn.Parameter, DTensor]]] = {}
    for parameter in parameters:
        gradient = parameter.grad
        if isinstance(gradient, DTensor) and any(p.is_partial() for p in gradient.placements):
            by_mesh.setdefault(gradient.device_mesh, []).append((parameter, gradient))
    for mesh, summands in by_mesh.items():
        flat = torch.cat([gradient.to_local().flatten() for _, gradient in summands])
        torch.distributed.all_reduce(flat, group=mesh.get_group())
        parts = flat.split([gradient.numel() for _, gradient in summands])
        for (parameter, gradient), part in zip(summands, parts, strict=True):
            parameter.grad = DTensor.from_local(
                part.view(gradient.shape), mesh, [Replicate()], run_check=False
            )
