"""What a checkpoint has: names, sizes, random states, and whether its numbers are finite."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from hpctrain.data import generators
from hpctrain.engine.distributed.tensors import local
from hpctrain.engine.layers.dry_run import stored_buffers


class Tensors(Protocol):
    """More tensors that a rank saves and loads, beside models and optimizers.

    Attributes:
        tensors: What this rank saves, by `RANK.NAME`.
        loaded: What this rank has loaded, by NAME.
    """

    tensors: dict[str, torch.Tensor]
    loaded: dict[str, torch.Tensor]

    def of_rank(self, names: Collection[str], saved: int) -> dict[str, str]:
        """Return what this rank loads of these names, which `saved` ranks have saved, by NAME."""


def random_states(rank: int) -> dict[str, torch.Tensor]:
    """Return the states of the random generators of a rank, as they are saved."""
    return {f"random.{name}.{rank}": each for name, each in generators.states().items()}


def bytes_of(values: Iterable[Any]) -> int:
    """Return the bytes of what this rank has of tensors."""
    return sum(local(each).nbytes for each in values if isinstance(each, torch.Tensor))


def empty_of(entry: Any) -> torch.Tensor | None:
    """Return a tensor to load an entry of a checkpoint into; None for what is no tensor."""
    if isinstance(entry, TensorStorageMetadata):
        return torch.empty(entry.size, dtype=entry.properties.dtype)
    return None


def joined(outer: str, name: str) -> str:
    """Return the name of what a model, an optimizer or a part has; one of them may have none."""
    return f"{outer}.{name}" if outer and name else outer or name


_WRAPPERS = ("module", "_orig_mod", "_checkpoint_wrapped_module")


def plain_name(name: str) -> str:
    """Return the name in the plain model, without what DDP, the compiler and others add."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def module_state(state: dict[str, Any]) -> dict[str, Any]:
    """Return the part of a model's state dict that torch's modules save and load by themselves.

    Some models add what describes them: neuraloperator's have their arguments, which may be
    functions. The config builds the model anew, and nothing of it is needed.
    """
    return {
        name: value
        for name, value in state.items()
        if isinstance(value, torch.Tensor) or name.endswith("_extra_state")
    }


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
            if next(module.buffers(), None) is not None:
                for name, buffer in stored_buffers(module):
                    yield joined(outer, name), buffer


def _listed(flags: list[torch.Tensor]) -> list[bool]:
    """Return the values of flags, whose devices may differ."""
    return torch.stack([flag.to(flags[0].device) for flag in flags]).tolist() if flags else []
