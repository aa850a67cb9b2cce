"""Parameters that several modules of a model share, such as tied embeddings."""

from collections.abc import Iterator, Sequence

from torch import nn


def ties(model: nn.Module) -> Iterator[tuple[str, list[str]]]:
    """Yield the names of parameters that several modules share: the first, and the others."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    for same in names.values():
        if len(same) > 1:
            yield same[0], same[1:]


def tie(model: nn.Module, first: str, others: Sequence[str]) -> None:
    """Let the modules that have the other names share the parameter `first`, in place."""
    parameter = model.get_parameter(first)
    for other in others:
        module, _, key = other.rpartition(".")
        setattr(model.get_submodule(module), key, parameter)
