"""Batch norm over all data-parallel ranks: the statistics of a step are those of one process.

    rank 0: its rows ── n, sum, sum of squares ──┐                ┌── normalised rows of rank 0
                                                 ├── mean, var ───┤
    rank 1: its rows ── n, sum, sum of squares ──┘                └── normalised rows of rank 1

Ioffe and Szegedy, "Batch Normalization" (2015). A layer keeps its class and its parameters. Only
the call of `torch.nn.functional.batch_norm` inside of its forward function is replaced, so classes
that do more than normalise, such as timm's BatchNormAct2d, work as they are.

Several micro-batches cannot have the statistics of their whole batch: a layer would have to see the
outputs of the layer before for all of them, which is the memory that micro-batches save.
"""

import functools
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.overrides import TorchFunctionMode

from hpctrain.base.errors import ConfigError
from hpctrain.engine.distributed import objects
from hpctrain.engine.distributed.tensors import wide
from hpctrain.engine.parallel.mesh import Mesh
from hpctrain.engine.parallel.setup import Training

log = logging.getLogger(__name__)
FILLED_UP = "data.tail=pad fills up the last batch of an epoch with rows that come twice, and"


def prepare_batch_norms(model: nn.Module, mesh: Mesh, training: Training) -> None:
    """Synchronise the batch norms of a model, in place, if `train.sync_batchnorm` says so.

    Rank 0 warns if the statistics depend on how a batch is divided: over the ranks, and into
    micro-batches. All ranks call this together with the whole model.
    """
    layers, train = list(depending(model)), training.train
    text = _warning(layers, mesh, training) if layers and training.says else ""
    if text and dist.get_rank() == 0:
        log.warning("%s", text)
    if not train.sync_batchnorm or mesh.dp_cp_size == 1:
        return
    group = mesh.batch_group
    for name, layer in layers:
        if isinstance(layer, _BatchNorm) and not isinstance(layer, nn.SyncBatchNorm):
            forward: Any = functools.partial(_forward, layer.forward, name, layer, group)
            if train.compile != "off":  # the compiler knows no such collectives
                forward = torch.compiler.disable(forward)
            layer.forward = forward  # type: ignore[method-assign]


def check_filled_up(model: nn.Module, norm: Any) -> None:
    """Refuse a model in whose statistics rows would count that only fill up a batch.

    All ranks call this together, if some batches of the training are filled up (`data.tail=pad`).
    """
    here = [f"{name} ({type(layer).__name__})" for name, layer in depending(model)]
    found = [text for texts in objects.all_gather(here) for text in texts]
    layers = list(dict.fromkeys(text.removeprefix("module.") for text in found))
    if layers:
        more = f" and {len(layers) - 1} more layers" if len(layers) > 1 else ""
        raise ConfigError(
            f"{FILLED_UP} the statistics of {layers[0]}{more} would count them: use "
            "data.tail=drop, a train.global_batch_size that divides the samples of an epoch, or "
            f"{_other_norm(norm)}"
        )


def _other_norm(norm: Any) -> str:
    own = "model.norm=group" if norm == "batch" else "such as GroupNorm"
    return f"a norm whose result does not depend on other samples ({own})"


def depending(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the names and layers whose statistics are those of the rows that they see."""
    for name, layer in model.named_modules():
        # An instance norm has one result for each sample, but may average the statistics.
        each = isinstance(layer, _InstanceNorm) and not layer.track_running_stats
        if isinstance(layer, _NormBase) and layer.training and not each:
            yield name, layer


def _warning(layers: list[tuple[str, nn.Module]], mesh: Mesh, training: Training) -> str:
    seen, ranks = list[str](), mesh.dp_cp_size
    train, parts = training.train, training.accumulate
    alone = [
        (name, layer)
        for name, layer in layers
        if not isinstance(layer, nn.SyncBatchNorm)
        and not (train.sync_batchnorm and isinstance(layer, _BatchNorm))
    ]
    if ranks > 1 and alone:
        seen.append(f"one of {ranks} data-parallel ranks")
    if parts > 1 or train.micro_batch_size == "auto":
        alone = layers
        seen.append(f"one of {parts} micro-batches" if parts > 1 else "one micro-batch")
    if not seen:
        return ""
    cures = [f"take {_other_norm(training.norm)}"]
    if len(seen) == 1 and ranks > 1 and not train.sync_batchnorm and training.may_sync():
        cures.insert(0, "compute them over all ranks (train.sync_batchnorm=true)")
    name, layer = alone[0]
    more = f" and {len(alone) - 1} more layers" if len(alone) > 1 else ""
    return (
        f"the statistics of {name} ({type(layer).__name__}){more} are those of the rows that "
        f"{' and '.join(seen)} has, so losses differ from those of one process that sees whole "
        f"batches: {', or '.join(cures)}"
    )


def _forward(
    forward: Callable[..., Any],
    name: str,
    layer: nn.Module,
    group: dist.ProcessGroup,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Call the forward function of a layer; its batch norm is that of all ranks of the group."""
    with _OverRanks(group) as mode:
        outputs = forward(*args, **kwargs)
    if layer.training and not mode.used:
        raise ConfigError(
            f"train.sync_batchnorm=true: {name} ({type(layer).__name__}) does not call "
            "torch.nn.functional.batch_norm, so its statistics cannot be those of all ranks"
        )
    return outputs


class _OverRanks(TorchFunctionMode):
    """Within this context, batch norms take their statistics from the inputs of all ranks."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.group, self.used = group, False

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Replace a call of `torch.nn.functional.batch_norm`; make any other call as it is."""
        if func is not F.batch_norm:
            return func(*args, **(kwargs or {}))
        self.used = True
        return self._batch_norm(*args, **(kwargs or {}))

    def _batch_norm(
        self,
        x: torch.Tensor,
        running_mean: torch.Tensor | None,
        running_var: torch.Tensor | None,
        weight: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> torch.Tensor:
        if not training:
            return F.batch_norm(x, running_mean, running_var, weight, bias, False, momentum, eps)
        stats = (running_mean, running_var)
        out: torch.Tensor = _BatchNormOverRanks.apply(  # type: ignore[no-untyped-call]
            x, weight, bias, *stats, eps, momentum, self.group
        )
        return out


class _BatchNormOverRanks(torch.autograd.Function):
    """What torch's SyncBatchNorm computes for (batch, channels, ...), without waits of the host.

    One reduction in fp64 gives the mean and the variance; squares of fp32 numbers fit into it.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        running_mean: torch.Tensor | None,
        running_var: torch.Tensor | None,
        eps: float,
        momentum: float,
        group: dist.ProcessGroup,
    ) -> torch.Tensor:
        values, channels = wide(x), x.shape[1]
        sums = values.new_zeros(2 * channels + 1, dtype=torch.float64)
        if count := x.numel() // channels:  # a rank may have no rows
            mean, var = (s.double() for s in torch.batch_norm_update_stats(values, None, None, 0.0))
            sums = torch.cat([mean, var + mean**2, sums.new_ones(1)]) * count
        dist.all_reduce(sums, group=group)
        n = sums[-1]
        mean, squares = (sums[:-1] / n).view(2, channels)
        var = (squares - mean**2).clamp(min=0)
        if running_mean is not None and running_var is not None:
            unbiased = var * n / (n - 1).clamp(min=1)
            running_mean.lerp_(mean.to(running_mean.dtype), momentum)
            running_var.lerp_(unbiased.to(running_var.dtype), momentum)
        ctx.group, ctx.eps, ctx.biased = group, eps, bias is not None
        ctx.save_for_backward(x, weight, mean, (var + eps).rsqrt(), n)
        stats = (mean.to(values.dtype), var.to(values.dtype))
        w, b = (None if p is None else p.to(values.dtype) for p in (weight, bias))
        return F.batch_norm(values, *stats, w, b, False, 0.0, eps).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, mean, scale, n = ctx.saved_tensors
        dy, shape = wide(grad), [-1] + [1] * (x.ndim - 2)
        others = [dim for dim in range(x.ndim) if dim != 1]

        def each(values: torch.Tensor) -> torch.Tensor:
            return values.to(dy.dtype).view(shape)

        normalised = (wide(x) - each(mean)) * each(scale)
        sums = torch.stack([dy.sum(others), (dy * normalised).sum(others)])
        # Those of all ranks are added later, as are the gradients of other parameters.
        of_weight = None if weight is None else sums[1].to(weight.dtype)
        of_bias = sums[0].to(weight.dtype if weight is not None else dy.dtype)
        of_x = None
        if ctx.needs_input_grad[0]:
            means = sums.to(torch.float64, copy=True)
            dist.all_reduce(means, group=ctx.group)
            means /= n
            factor = scale if weight is None else scale * weight
            of_x = (dy - each(means[0]) - normalised * each(means[1])) * each(factor)
            of_x = of_x.to(x.dtype)
        return of_x, of_weight, of_bias if ctx.biased else None, *[None] * 5
