"""Loads of experts: each step balances them, and reports how uneven they are.

backward passes ── loads of this rank ── sum over all ranks ──┬── bias of each expert
(the reduction of the step's sums)                            └── expert_load_max, expert_dropped
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch
from torch import nn


@runtime_checkable
class Balanced(Protocol):
    """A module that balances its experts; `hpctrain.models.experts.Experts` is one."""

    def start_loads(self) -> None:
        """Forget the loads that were not taken."""

    def take_loads(self) -> torch.Tensor:
        """Return this rank's loads since the last call.

        Returns:
            float64 (experts + 1,): how many tokens have chosen each expert, and how many of these
            choices were dropped.
        """

    def move_balance(self, loads: torch.Tensor) -> None:
        """Prefer experts with little load from now on.

        Args:
            loads: The sum over all ranks, without the last element.
        """


class Loads:
    """The loads of all experts of a model.

    Args:
        model: Without modules that are `Balanced`, all methods do nothing.
    """

    def __init__(self, model: nn.Module) -> None:
        self._modules = [module for module in model.modules() if isinstance(module, Balanced)]
        self._sizes: list[int] = []

    def start(self) -> None:
        """Begin a step; a step may be made again after an error."""
        for module in self._modules:
            module.start_loads()

    def take(self) -> list[torch.Tensor]:
        """Return the loads of this rank's part of a step, which are to be added over all ranks."""
        loads = [module.take_loads() for module in self._modules]
        self._sizes = [len(load) for load in loads]
        # Ranks that divide a layer have other tokens, or all have the same: what counts is a ratio.
        return loads

    def balance(
        self, total: torch.Tensor, names: list[str], sums: torch.Tensor
    ) -> tuple[list[str], torch.Tensor]:
        """Balance the experts.

        Args:
            total: What `take` returned, concatenated and added over all ranks.
            names: Of the sums of the step.
            sums: A sum and a count for each name.

        Returns:
            `names` and `sums`, to which two are added: the largest load of an expert over the mean
            one, in the layer where it is largest, and the fraction of dropped choices.
        """
        if not self._modules:
            return names, sums
        loads = total.split(self._sizes)
        for module, load in zip(self._modules, loads, strict=True):
            module.move_balance(load[:-1])
        largest = torch.stack([load[:-1].max() / load[:-1].mean() for load in loads]).max()
        dropped = torch.stack([load[-1] for load in loads]).sum()
        chosen = torch.stack([load[:-1].sum() for load in loads]).sum()
        more = torch.stack([largest, torch.ones_like(largest), dropped, chosen])
        return [*names, "expert_load_max", "expert_dropped"], torch.cat([sums, more])


def compute_eagerly(model: nn.Module) -> None:
    """Let torch.compile leave out the experts, in place.

    It would compile anew for each number of tokens that an expert gets.
    """
    for module in model.modules():
        if isinstance(module, Balanced):
            module.forward = torch.compiler.disable(module.forward)  # type: ignore[no-untyped-call]
