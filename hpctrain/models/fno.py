"""The Fourier neural operator: fields in, fields out, on grids of any size."""

from collections.abc import Sequence
from itertools import product

import torch
import torch.nn.functional as F
from torch import nn

from hpctrain.errors import ConfigError
from hpctrain.models.formats import wide
from hpctrain.models.model import Model


class FNO(Model):
    """Layers that mix channels mode by mode in Fourier space, and point by point.

        field ── lift ── layer ── ... ── layer ── project ── field
        layer(v) = gelu(F^-1(R F(v)) + W v)           (the last one without gelu)

    Li et al. 2021, "Fourier Neural Operator for Parametric Partial Differential Equations". R has a
    complex matrix for each of the lowest modes; higher ones are cut off. The weights belong to
    modes, not to points, so a trained model also takes finer grids.

    Args:
        in_channels: Number of channels of the input.
        out_channels: Number of channels of the output.
        modes: The number of modes of each dimension, as many as the grid has. Modes of both signs
            are kept, but for the last dimension, whose negative ones follow from the others.
        width: Channels of the layers.
        layers: Number of layers.
        positions: Whether the model also gets the position of each point, 0 to 1 along each
            dimension; without them it treats all places alike.

    Raises:
        ValueError: A number is below 1, or there are more than three dimensions.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        modes: Sequence[int] = (12, 12),
        width: int = 32,
        layers: int = 4,
        positions: bool = False,
    ) -> None:
        super().__init__()
        if not 1 <= len(modes) <= 3 or min(*modes, width, layers) < 1:
            raise ValueError(
                f"modes={[*modes]}, width={width}, layers={layers}: each is 1 or more, and there "
                "are as many modes as dimensions of the grid, 1 to 3"
            )
        self.positions = positions
        self.lift = nn.Linear(in_channels + len(modes) * positions, width)
        self.layers = nn.ModuleList(
            _Layer(width, modes, last=number == layers - 1) for number in range(layers)
        )
        self.hidden = nn.Linear(width, 4 * width)
        self.project = nn.Linear(4 * width, out_channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map fields, (batch, in_channels, *grid), to (batch, out_channels, *grid)."""
        if self.positions:
            axes = [torch.linspace(0, 1, size, device=x.device) for size in x.shape[2:]]
            grid = torch.stack(torch.meshgrid(*axes, indexing="ij"))
            x = torch.cat([x, grid.to(x.dtype).expand(len(x), *grid.shape)], 1)
        x = self.lift(x.movedim(1, -1)).movedim(-1, 1)
        for layer in self.layers:
            x = layer(x)
        out: torch.Tensor = self.project(F.gelu(self.hidden(x.movedim(1, -1)))).movedim(-1, 1)
        return out


class _Layer(nn.Module):
    def __init__(self, width: int, modes: Sequence[int], last: bool) -> None:
        super().__init__()
        self.last = last
        self.spectral = _SpectralConvolution(width, modes)
        self.pointwise = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (batch, width, *grid) to the same shape."""
        y = self.spectral(x) + self.pointwise(x.movedim(1, -1)).movedim(-1, 1)
        return y if self.last else F.gelu(y)


class _SpectralConvolution(nn.Module):
    """A complex matrix for each of the lowest modes, as real tensors with a last axis of two parts.

    So every optimizer, file format and way to divide parameters takes them. The transform is in
    float32 or float64: half precision has none of most sizes, and would lose the small modes.
    """

    def __init__(self, width: int, modes: Sequence[int]) -> None:
        super().__init__()
        self.modes = tuple(modes)
        corners = 2 ** (len(modes) - 1)
        self.weight = nn.Parameter(torch.empty(corners, width, width, *modes, 2))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the initial weights: the sum over the input channels keeps the variance."""
        nn.init.normal_(self.weight, std=(1 / (2 * self.weight.shape[1])) ** 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (batch, width, *grid) to the same shape; under autocast the result is float32."""
        grid, dims = x.shape[2:], tuple(range(2, x.dim()))
        self._check(grid)
        mixed_precision = torch.is_autocast_enabled(x.device.type)
        with torch.autocast(x.device.type, enabled=False):
            waves = torch.fft.rfftn(wide(x), dim=dims, norm="forward")
            weight = torch.view_as_complex(wide(self.weight).contiguous())
            mixed = torch.zeros_like(waves)
            for corner, matrix in zip(self._corners(), weight, strict=True):
                mixed[corner] = torch.einsum("bi...,io...->bo...", waves[corner], matrix)
            out: torch.Tensor = torch.fft.irfftn(mixed, s=grid, dim=dims, norm="forward")
            # Autocast casts what it needs; without it the layers have the dtype of their input.
            return out if mixed_precision else out.to(x.dtype)

    def _corners(self) -> list[tuple[slice, ...]]:
        """Return the places of the lowest modes: those of each sign in all dimensions but one."""
        *signed, last = self.modes
        both = [(slice(0, count), slice(-count, None)) for count in signed]
        every = slice(None)
        return [(every, every, *chosen, slice(0, last)) for chosen in product(*both)]

    def _check(self, grid: torch.Size) -> None:
        most = [size // 2 for size in grid[:-1]] + [grid[-1] // 2 + 1]
        if len(grid) != len(self.modes) or any(
            count > limit for count, limit in zip(self.modes, most, strict=True)
        ):
            raise ConfigError(
                f"model.modes={[*self.modes]}: the fields have a grid of {[*grid]} points, which "
                f"has {most} modes: give as many numbers as the grid has dimensions, at most these"
            )
