"""The linear map of each wave of a periodic field that fits pairs of snapshots best.

    after(k) = A(k) [before(k), before(k) c1, before(k) c2, ...]

A linear map that treats all places alike multiplies each Fourier mode k by a matrix of channels.
Here this matrix may also depend linearly on the constants c of a trajectory, such as a viscosity.
The maps are fitted by least squares. They know decay and waves, and nothing of how modes act on one
another, so a surrogate of a nonlinear equation must be better.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

_RIDGE = 1e-6  # relative to the mean power of the mode: modes without power are mapped to 0


@dataclass
class LinearWaves:
    """The fitted maps, complex128 (*modes, inputs, channels).

    The modes are those of `torch.fft.rfftn`, and the inputs are the channels times (1 + constants).
    """

    maps: torch.Tensor

    @classmethod
    def fit(cls, before: torch.Tensor, after: torch.Tensor, constants: torch.Tensor) -> LinearWaves:
        """Fit the maps to snapshots, (pairs, channels, *grid), and constants, (pairs, n)."""
        x, y = _inputs(_modes(before.double()), constants.double()), _modes(after.double())
        # Normal equations: a mode has few unknowns, and as many equations as there are pairs.
        square = torch.einsum("p...i,p...j->...ij", x.conj(), x)
        mixed = torch.einsum("p...i,p...c->...ic", x.conj(), y)
        size = square.shape[-1]
        power = square.diagonal(dim1=-2, dim2=-1).real.mean(-1)[..., None, None]
        largest = power.max()
        ridge = (_RIDGE * power).clamp(min=float(largest) * 1e-14)
        maps = torch.linalg.solve(square + ridge * torch.eye(size, dtype=square.dtype), mixed)
        return cls(maps)

    def __call__(self, before: torch.Tensor, constants: torch.Tensor) -> torch.Tensor:
        """Return the predicted snapshots; the arguments and the result are those of `fit`."""
        self.maps = self.maps.to(before.device)
        inputs = _inputs(_modes(before), constants)
        modes = torch.einsum("p...i,...ic->p...c", inputs, self.maps.to(inputs.dtype))
        grid, axes = before.shape[2:], tuple(range(2, before.dim()))
        found: torch.Tensor = torch.fft.irfftn(modes.movedim(-1, 1), s=grid, dim=axes)
        return found


def _modes(x: torch.Tensor) -> torch.Tensor:
    """Return the Fourier modes of (pairs, channels, *grid): complex (pairs, *modes, channels)."""
    modes: torch.Tensor = torch.fft.rfftn(x, dim=tuple(range(2, x.dim())))
    return modes.movedim(1, -1)


def _inputs(modes: torch.Tensor, constants: torch.Tensor) -> torch.Tensor:
    """Return (pairs, *modes, channels x (1 + constants))."""
    factors = torch.cat([constants.new_ones(len(constants), 1), constants], 1)
    shaped = factors.view(len(factors), *[1] * (modes.dim() - 2), 1, factors.shape[1])
    return (modes.unsqueeze(-1) * shaped).flatten(-2)
