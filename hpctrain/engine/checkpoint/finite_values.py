"""Whether what a checkpoint has of the models is finite, and the names that it has there."""

from collections.abc import Iterator, Mapping

import torch
from torch import nn

from hpctrain.engine.checkpoint.starting_point import plain_name
from hpctrain.engine.distributed.tensors import local
from hpctrain.engine.layers.dry_run import stored_buffers


def joined(outer: str, name: str) -> str:
    """Return the name of what a model, an optimizer or a part has; one of them may have none."""
    return f"{outer}.{name}" if outer and name else outer or name


class FiniteValues:
    """The parameters of models that are trained, and the buffers that are finite at the start.

    Other buffers may be infinite by design, as the mask of an attention is.
    """

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self._modules = modules
        self._judged = {
            name: buffer.shape
            for name, buffer in self._buffers()
            if buffer.is_floating_point() and bool(buffer.isfinite().all())
        }

    def wrong(self) -> str:
        """Return the first one of this rank that is not finite by now; "" if all are."""
        judged: dict[str, torch.Tensor] = {
            f"parameter {joined(outer, name)}": parameter
            for outer, module in self._modules.items()
            for name, parameter in module.named_parameters()
            if parameter.requires_grad
        }
        for name, buffer in self._buffers():
            if self._judged.get(name) == buffer.shape:
                judged[f"buffer {name}"] = buffer
        own = [local(value.detach()) for value in judged.values()]
        # A sum is soon known. It is not finite if a value is not, and where it overflows.
        if all(_listed([value.sum().isfinite() for value in own])):
            return ""
        found = zip(judged, _listed([value.isfinite().all() for value in own]), strict=True)
        kind, _, name = next((name for name, good in found if not good), "").partition(" ")
        return f"{kind} {plain_name(name)}" if kind else ""

    def _buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        for outer, module in self._modules.items():
            for name, buffer in stored_buffers(module):
                yield joined(outer, name), buffer


def _listed(flags: list[torch.Tensor]) -> list[bool]:
    """Return the values of flags, whose devices may differ."""
    return torch.stack([flag.to(flags[0].device) for flag in flags]).tolist() if flags else []
