"""Whether what a checkpoint holds of a model is finite."""

import torch
from torch import nn

from hpctrain.checkpoint.starting_point import plain_name
from hpctrain.distributed.tensors import local
from hpctrain.models.dry_run import stored_buffers


class FiniteValues:
    """The parameters of a model that are trained, and the buffers that are finite at the start.

    Other buffers may be infinite by design, as the mask of an attention is.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._judged = {
            name: buffer.shape
            for name, buffer in stored_buffers(module)
            if buffer.is_floating_point() and bool(buffer.isfinite().all())
        }

    def wrong(self) -> str:
        """Return the first one of this rank that is not finite by now; "" if all are."""
        named = self._module.named_parameters()
        judged: dict[str, torch.Tensor] = {f"parameter {n}": p for n, p in named if p.requires_grad}
        for name, buffer in stored_buffers(self._module):
            if self._judged.get(name) == buffer.shape:
                judged[f"buffer {name}"] = buffer
        own = [local(value.detach()) for value in judged.values()]
        # A sum is soon known. It is not finite if a value is not, and where it overflows.
        if all(_listed([value.sum().isfinite() for value in own])):
            return ""
        found = zip(judged, _listed([value.isfinite().all() for value in own]), strict=True)
        kind, _, name = next((name for name, good in found if not good), "").partition(" ")
        return f"{kind} {plain_name(name)}" if kind else ""


def _listed(flags: list[torch.Tensor]) -> list[bool]:
    """Return the values of flags, whose devices may differ."""
    return torch.stack([flag.to(flags[0].device) for flag in flags]).tolist() if flags else []
