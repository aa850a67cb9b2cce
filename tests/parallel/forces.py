"""Models and tasks that compute a gradient in a step, beside that of the loss."""

from typing import Any

import torch
from torch import nn

from hpctrain.data.shards.types import Batch
from hpctrain.engine.layers.plan import Plan
from hpctrain.tasks import SplitTask, Sums
from tests.parallel.frozen import Layer


class Forces(nn.Module):
    """Energies of positions (batch, 6), and forces, which are their gradient.

    Args:
        again: Whether the blocks are called once more after the gradient.
    """

    def __init__(self, again: bool = False) -> None:
        super().__init__()
        self.embed = nn.Linear(6, 16)
        self.layers = nn.ModuleList(Layer(16, 16) for _ in range(4))
        self.head = nn.Linear(16, 1)
        self.again = again

    @property
    def plan(self) -> Plan:
        """How the model may be divided."""
        styles = {f"layers.{i}.linear": ("colwise", "rowwise")[i % 2] for i in range(4)}
        return Plan(tensor=styles, first=("embed",), blocks="layers", last=("head",))

    def energies(self, positions: torch.Tensor) -> torch.Tensor:
        x = self.embed(positions)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)[:, 0]

    def forward(self, positions: torch.Tensor) -> torch.Tensor:
        """Return energies and forces, (batch, 7)."""
        with torch.enable_grad():
            positions = positions.detach().requires_grad_()
            energies = self.energies(positions)
            (slope,) = torch.autograd.grad(energies.sum(), positions, create_graph=self.training)
        if self.again:
            energies = energies + self.energies(positions.detach() + 0.1)
        return torch.cat([energies[:, None], -slope], 1)


class Energies(nn.Module):
    """Energies of positions (batch, 6), whose gradient the task computes."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Forces()
        self.layers, self.inner.layers = self.inner.layers, nn.ModuleList()

    def forward(self, positions: torch.Tensor) -> torch.Tensor:
        """Return the energies, (batch,)."""
        x = self.inner.embed(positions)
        for layer in self.layers:
            x = layer(x)
        return self.inner.head(x)[:, 0]


class Fit(SplitTask):
    """The squares of the differences of what the model returns."""

    def inputs(self, batch: Batch) -> tuple[torch.Tensor, ...]:
        return (batch["x"].flatten(1)[:, :6],)

    def sums(self, outputs: Any, batch: Batch) -> Sums:
        errors = (outputs - batch["y"].flatten(1)[:, : outputs.shape[1]]).pow(2).mean(1)
        return {"loss": ((errors * batch["mask"]).sum(), batch["mask"].sum())}


class Penalty:
    """The energies, and the squares of their gradient, as a gradient penalty has them."""

    def __call__(self, model: nn.Module, batch: Batch) -> Sums:
        with torch.enable_grad():
            x = batch["x"].flatten(1)[:, :6].requires_grad_()
            energies = model(x)
            (slope,) = torch.autograd.grad(energies.sum(), x, create_graph=True)
        errors = (energies - batch["y"].flatten(1)[:, 0]).pow(2) + slope.pow(2).sum(1)
        return {"loss": ((errors * batch["mask"]).sum(), batch["mask"].sum())}

    loss_parallel = False


class Adversarial(Penalty):
    """The energies of positions that were moved along the gradient, which is not followed."""

    def __call__(self, model: nn.Module, batch: Batch) -> Sums:
        with torch.enable_grad():
            x = batch["x"].flatten(1)[:, :6].requires_grad_()
            (slope,) = torch.autograd.grad(model(x).sum(), x)
        energies = model(x.detach() + 0.1 * slope)
        errors = (energies - batch["y"].flatten(1)[:, 0]).pow(2)
        return {"loss": ((errors * batch["mask"]).sum(), batch["mask"].sum())}
