"""Loads of experts: each step balances them, and reports how uneven they are.

backward passes ── loads of this rank ── sum over all ranks ──┬── bias of each expert
(the reduction of the step's sums)                            └── expert_load_max
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from hpctrain.engine.parallel.reducing.scalars import Numbers, tensor_of


def counts_loads(module: Any) -> bool:
    """Return whether a module has experts, as `hpctrain.models.experts.Experts` has them."""
    return hasattr(module, "take_loads")


class Loads:
    """The loads of all experts of a model.

    `model` is what this rank has; `sizes` are the numbers of experts of each module of the whole
    model that has some, by its name.
    """

    def __init__(self, model: nn.Module, sizes: Mapping[str, int]) -> None:
        self._sizes = sizes
        # Other ranks have other layers of a pipeline.
        modules = dict(model.named_modules())
        found = (modules.get(name) for name in self._sizes)
        self._modules: list[Any] = [each if counts_loads(each) else None for each in found]

    def start(self) -> None:
        """Begin a step."""
        for module in self._modules:
            if module is not None:
                module.start_loads()

    def joined(self, values: torch.Tensor) -> torch.Tensor:
        """Return the numbers of this rank's part of a step, followed by its loads."""
        # The ranks that divide a layer have other tokens, or all have the same. All of them count,
        # because only ratios of loads matter.
        loads = [
            torch.zeros(size, dtype=torch.float64, device=values.device)
            if module is None
            else module.take_loads()
            for size, module in zip(self._sizes.values(), self._modules, strict=True)
        ]
        return torch.cat([values, *(load.to(values.device) for load in loads)])

    def balance(
        self, total: torch.Tensor, names: list[str], sums: Numbers
    ) -> tuple[list[str], Numbers]:
        """Balance the experts by what `joined` has appended, added over all ranks.

        Returns the names and the sums of the step (a sum and a count for each name) with one more:
        the largest load of an expert over the mean one, in the layer where it is largest.
        """
        loads = total.split(list(self._sizes.values()))
        for module, load in zip(self._modules, loads, strict=True):
            if module is not None:
                module.move_balance(load)
        largest = torch.stack([load.max() / load.mean() for load in loads]).max()
        more = torch.stack([largest, torch.ones_like(largest)])
        return [*names, "expert_load_max"], torch.cat([tensor_of(sums), more])


def compute_eagerly(model: nn.Module) -> None:
    """Let torch.compile leave out the experts: it would compile for each number of tokens."""
    for module in model.modules():
        if counts_loads(module):
            module.forward = torch.compiler.disable(module.forward)
