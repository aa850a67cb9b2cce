"""Fields that evolve in time: a model predicts the next snapshot, beside two simple predictions.

trajectory   w0 w1 w2 w3        (steps, *grid) or (steps, channels, *grid)
inputs       w0 w1 w2           each snapshot, and the constants of the trajectory
prediction   w0 + model(w0) ...
targets         w1 w2 w3
"""

import copy
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch

from hpctrain.data.sources.reader import Reader
from hpctrain.errors import ConfigError, DataError
from hpctrain.shards.index import Index
from hpctrain.shards.types import Batch
from hpctrain.tasks.linear_waves import LinearWaves
from hpctrain.tasks.outputs import described, prediction
from hpctrain.tasks.regression import relative_l2
from hpctrain.tasks.task import SplitTask, Sums, field, in_default_dtype

log = logging.getLogger(__name__)


class Evolution(SplitTask):
    """The error of the next snapshot of fields on a periodic grid.

    The model gets a snapshot, whose standard deviation over the data set is scaled to 1, and the
    constants as channels. It returns the change until the next snapshot. The loss is the relative
    L2 error, as in `Regression`. The sums are `loss`, `relative_l2` (the same) and
    `spectral_error`: how far the power spectrum of the prediction is from that of the target, the
    sum over shells of wavenumbers of |difference of power| over the target's whole power.

    An evaluation also has both errors of two predictions that cost nothing: `..._persistence`,
    where nothing changes, and `..._linear`, the linear map of each wave that fits the training
    split best (`hpctrain.tasks.linear_waves`).

    Args:
        field: Field of the trajectories, a floating dtype, shape (batch, steps, *grid), or
            (batch, steps, channels, *grid).
        constants: Fields of one number for each trajectory, such as a viscosity.
        dims: Dimensions of the grid.
        split: Split that the scales and the linear map come from.
        fitted: Number of trajectories that the linear map is fitted to, the first of the split.

    Attributes:
        shown: The last snapshot of the first trajectory of the last batch that was evaluated, in
            the units of the data: the target and the prediction, float32 (channels, *grid).
    """

    def __init__(
        self,
        field: str = "vorticity",
        constants: Sequence[str] = (),
        dims: int = 2,
        split: str = "train",
        fitted: int = 64,
    ) -> None:
        if dims < 1 or fitted < 1:
            raise ValueError(f"dims={dims}, fitted={fitted}: both are 1 or more")
        self.field, self.constants, self.dims = field, tuple(constants), dims
        self.split, self.fitted = split, fitted
        self.shown: tuple[torch.Tensor, torch.Tensor] | None = None
        self._scale = 1.0
        self._moments: dict[str, tuple[float, float]] = {}
        self._linear: LinearWaves | None = None
        self._shells: torch.Tensor | None = None

    def bind(self, source: str | Path) -> Self:
        """Return this task with the scales of the data set and the fitted linear map."""
        bound = copy.copy(self)
        reader = Reader(source, self.split, [self.field, *self.constants])
        bound._scale = 1 / _moments(reader.index, self.split, self.field)[1]
        bound._moments = {name: _moments(reader.index, self.split, name) for name in self.constants}
        rows = np.arange(min(self.fitted, len(reader)))
        samples = {name: torch.as_tensor(value) for name, value in reader.read(rows).items()}
        before, after, constants = bound._pairs(samples)
        bound._linear = LinearWaves.fit(before, after, constants)
        log.info("the linear map of each wave is fitted to %d pairs of snapshots", len(before))
        return bound

    def inputs(self, batch: Batch) -> tuple[torch.Tensor, ...]:
        """Return the snapshots but the last: float32 (batch x (steps - 1), channels, *grid)."""
        before, _, constants = self._pairs(batch)
        grid = before.shape[2:]
        planes = constants.view(*constants.shape, *[1] * self.dims).expand(-1, -1, *grid)
        return (torch.cat([before, planes], 1),)

    def sums(self, outputs: Any, batch: Batch) -> Sums:
        """Return the sums of a `Task`; trajectories whose mask is False do not count.

        The outputs are the changes, a floating dtype, (batch x (steps - 1), channels, *grid).
        """
        change = prediction(outputs, "changes (pairs of snapshots, channels, *grid)")
        before, after, constants = self._pairs(batch)
        if change.shape != after.shape:
            raise ConfigError(
                f"the model returned {described(change)}; the change of task.field={self.field} is "
                f"{described(after)}"
            )
        found, pairs = before + in_default_dtype(change), len(before) // len(batch["mask"])
        mask = batch["mask"].repeat_interleave(pairs)
        count = mask.sum()
        loss = (relative_l2(found - after, after) * mask).sum()
        spectral = (self._spectral_error(found.detach(), after) * mask).sum()
        sums = {
            "loss": (loss, count),
            "relative_l2": (loss.detach(), count),
            "spectral_error": (spectral, count),
        }
        if torch.is_grad_enabled():
            return sums
        last = pairs - 1
        self.shown = after[last] / self._scale, found[last] / self._scale
        simple = {"persistence": before}
        if self._linear is not None:
            simple["linear"] = self._linear(before, constants)
        for name, guess in simple.items():
            sums[f"relative_l2_{name}"] = ((relative_l2(guess - after, after) * mask).sum(), count)
            error = (self._spectral_error(guess, after) * mask).sum()
            sums[f"spectral_error_{name}"] = (error, count)
        return sums

    def _pairs(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return scaled snapshots, those that follow, and the standardised constants."""
        x = in_default_dtype(field(batch, self.field, "task.field")) * self._scale
        if x.dim() == self.dims + 2:
            x = x.unsqueeze(2)
        if x.dim() != self.dims + 3 or x.shape[1] < 2:
            raise ConfigError(
                f"task.field={self.field} is {described(batch[self.field])}; with task.dims="
                f"{self.dims} a trajectory is (batch, steps, *grid) or (batch, steps, channels, "
                "*grid), with 2 steps or more"
            )
        each = x.shape[1] - 1
        values = [self._standard(batch, name) for name in self.constants]
        constants = torch.stack(values, 1) if values else x.new_empty(len(x), 0)
        before, after = (part.flatten(0, 1) for part in (x[:, :-1], x[:, 1:]))
        return before, after, constants.repeat_interleave(each, 0)

    def _standard(self, batch: Batch, name: str) -> torch.Tensor:
        values = in_default_dtype(field(batch, name, "task.constants"))
        if values.dim() != 1:
            raise ConfigError(
                f"task.constants: {name} is {described(values)}; it must be one number for each "
                "trajectory"
            )
        mean, std = self._moments.get(name, (0.0, 1.0))
        return (values - mean) / std

    def _spectral_error(self, found: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        ours, theirs = (self._spectrum(x) for x in (found, target))
        return (ours - theirs).abs().sum(1) / theirs.sum(1).clamp(min=1e-12)

    def _spectrum(self, x: torch.Tensor) -> torch.Tensor:
        """Return the power in each shell of wavenumbers, float32 (pairs, shells)."""
        axes = tuple(range(2, x.dim()))
        power = torch.fft.fftn(x, dim=axes, norm="forward").abs().square().sum(1)
        shells = self._shells
        if shells is None or shells.shape != power.shape[1:] or shells.device != x.device:
            waves = [torch.fft.fftfreq(size, 1 / size, device=x.device) for size in x.shape[2:]]
            grid = torch.meshgrid(*waves, indexing="ij")
            shells = torch.stack(grid).square().sum(0).sqrt().round().long()
            self._shells, self._count = shells, int(shells.max()) + 1
        total: torch.Tensor = power.new_zeros(len(power), self._count)
        return total.index_add(1, shells.flatten(), power.flatten(1))


def _moments(index: Index, split: str, name: str) -> tuple[float, float]:
    """Return mean and standard deviation of a field; 0 and 1 where they cannot scale."""
    found = index.statistics.get(split, {}).get(name)
    if found is None or found.mean is None or found.std is None:
        raise DataError(
            f"the index has no mean and standard deviation of field {name!r} in split {split!r}: "
            "write the data set with statistics"
        )
    return found.mean, found.std if found.std > 0 else 1.0
