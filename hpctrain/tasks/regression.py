"""Regression on tables and fields: numbers for each sample, or for each point of a grid."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hpctrain.base.errors import ConfigError
from hpctrain.data.shards.types import Batch
from hpctrain.engine.tasks.task import SplitTask, Sums, described
from hpctrain.tasks.batches import field, in_default_dtype, prediction

_LOSSES = ("mse", "l1", "relative_l2")


class Regression(SplitTask):
    """The error of predicted numbers, overall and for each channel.

        table    input (batch, features)         target (batch,) or (batch, outputs)
        field    input (batch, channels, H, W)   target (batch, channels, H, W)
        columns  input [age, height]             target [weight]: each field is one channel

    A channel is an element of the second axis. The sums are `loss`, and `mse`, `mae` and
    `relative_l2` without weights: the mean over samples of |prediction - target| / |target|, where
    |x| is the L2 norm over all channels and points of a sample (Li et al. 2021, "Fourier Neural
    Operator for Parametric Partial Differential Equations"). Channels with names have `mse/NAME`,
    too. `derived` adds `rmse`.

    Args:
        input: Field of the samples, any numeric dtype. With a list, the fields become the channels
            of one input, in this order; they have the same shape.
        target: Field of the targets, or a list, as for `input`.
        loss: What is minimised: "mse", "l1", or "relative_l2".
        channels: Names of the channels of the target; a list of targets has its own.
        weights: Weight of each channel in the loss, by name; 1 for those that are not named. The
            errors of mse and l1 are means with these weights; in relative_l2, both norms have them.
        scale: Factor from stored values to the model's input.
        metrics: Metrics of torchmetrics by name, for the evaluation. They get predictions and
            targets, float32, in the shape of the target.
        ignore: The value of targets that do not exist, such as nan. Then each target that exists
            counts the same, and relative_l2 is that of the targets of a sample that exist.

    Raises:
        ValueError: The loss is unknown, or a weight is negative or of an unknown channel; or there
            are `metrics` with `ignore`, which would count targets that do not exist.
    """

    def __init__(
        self,
        input: str | Sequence[str] = "x",
        target: str | Sequence[str] = "y",
        loss: str = "mse",
        channels: Sequence[str] | None = None,
        weights: Mapping[str, float] | None = None,
        scale: float = 1.0,
        metrics: Mapping[str, Any] | None = None,
        ignore: float | str | None = None,
    ) -> None:
        if metrics and ignore is not None:
            raise ValueError(f"metrics and ignore={ignore}: leave one of them out")
        if loss not in _LOSSES:
            raise ValueError(f"loss={loss}: it is {', '.join(_LOSSES)}")
        named = () if isinstance(target, str) else tuple(target)
        self.channels = tuple(channels or named)
        if named and self.channels != named:
            raise ValueError(f"channels={[*self.channels]}: the targets {[*named]} are their names")
        if unknown := (weights or {}).keys() - {*self.channels}:
            raise ValueError(
                f"weights={dict(weights or {})}: the channels are {[*self.channels]}, without "
                f"{', '.join(sorted(unknown))}; name them in channels"
            )
        given = [(weights or {}).get(name, 1.0) for name in self.channels]
        if any(not 0 <= weight < math.inf for weight in given) or (given and not any(given)):
            raise ValueError(f"weights={dict(weights or {})}: 0 or more, and one of them above 0")
        self.input, self.target, self.loss, self.scale = input, target, loss, scale
        self.metrics = metrics or {}
        self.ignore = None if ignore is None else float(ignore)  # "nan" is text in JSON
        # With a mean of 1, equal weights are the same as none.
        total = sum(given) / max(len(given), 1)
        shares = [weight / total for weight in given]
        self._weights = torch.tensor(shares, dtype=torch.float64) if weights else None

    def inputs(self, batch: Batch) -> tuple[torch.Tensor, ...]:
        """Return the scaled input, float32 (batch, ...); see `SplitTask`."""
        return (_stacked(batch, self.input, "task.input") * self.scale,)

    def sums(self, outputs: Any, batch: Batch) -> Sums:
        """Return the sums of a `Task`; samples whose mask is False do not count.

        The outputs are predictions, a floating dtype, in the shape of the target.
        """
        found, target = self.measured(outputs, batch)
        weights = self._for(target)
        known = batch["mask"].bool().view(-1, *[1] * (target.dim() - 1)).expand_as(target)
        if self.ignore is not None:
            gone = target.isnan() if math.isnan(self.ignore) else target == self.ignore
            known = known & ~gone
        error, target = (torch.where(known, each, 0.0) for each in (found - target, target))
        shown, samples = error.detach(), known.reshape(len(known), -1).any(1)

        def mean(errors: torch.Tensor, shares: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            if self.ignore is None:  # each sample counts the same, and else each target
                each = errors.flatten(1).mean(1) if errors.dim() > 1 else errors
                return (each * samples).sum(), samples.sum()
            return errors.sum(), shares.sum()

        if self.loss == "relative_l2":
            loss = (relative_l2(error, target, weights) * samples).sum(), samples.sum()
        else:
            errors = error.square() if self.loss == "mse" else error.abs()
            scale = 1 if weights is None else weights
            loss = mean(errors * scale, known * scale)
        sums = {
            "loss": loss,
            "mse": mean(shown.square(), known),
            "mae": mean(shown.abs(), known),
            "relative_l2": ((relative_l2(shown, target) * samples).sum(), samples.sum()),
        }
        for number, name in enumerate(self.channels):
            of = (slice(None), number) if target.dim() > 1 else ...
            sums[f"mse/{name}"] = mean(shown[of].square(), known[of])
        return sums

    def measured(self, outputs: Any, batch: Batch) -> tuple[torch.Tensor, ...]:
        """Return predictions and targets, float32, in the shape of the target."""
        found = prediction(outputs, "predictions in the shape of the target")
        target = _stacked(batch, self.target, "task.target")
        # A table's last layer has one output for a target without an axis for it, or the reverse.
        if found.numel() == target.numel() and {found.dim(), target.dim()} == {1, 2}:
            found = found.view_as(target)
        if found.shape != target.shape:
            raise ConfigError(
                f"the model returned {described(found)} for task.target={self.target}, which is "
                f"{described(target)}: a prediction has the shape of its target"
            )
        return in_default_dtype(found), target

    def derived(self, means: dict[str, float]) -> dict[str, float]:
        """Return the root of the mean square error over all samples."""
        return {"rmse": math.sqrt(means["mse"]) if means["mse"] >= 0 else math.nan}

    def _for(self, target: torch.Tensor) -> torch.Tensor | None:
        channels = target.shape[1] if target.dim() > 1 else 1
        if self.channels and len(self.channels) != channels:
            raise ConfigError(
                f"task.channels={[*self.channels]}: task.target={self.target} is "
                f"{described(target)}, with {channels} channels along its second axis"
            )
        if self._weights is None:
            return None
        self._weights = self._weights.to(target)
        return self._weights.view(-1, *[1] * max(target.dim() - 2, 0))


def relative_l2(
    error: torch.Tensor, target: torch.Tensor, weights: torch.Tensor | None = None
) -> torch.Tensor:
    """Return |error| / |target| of each sample, float32 (batch,), with L2 norms over (batch, ...).

    A target of zeros counts with the smallest norm above 0, so that its error is large but finite.
    The weights multiply the squares.
    """
    squares = [x.square() if weights is None else x.square() * weights for x in (error, target)]
    above, below = (x.flatten(1).sum(1) if x.dim() > 1 else x for x in squares)
    # The gradient of a root is infinite at 0, where a prediction is exactly right.
    smallest = torch.finfo(above.dtype).tiny
    return (above.clamp(min=smallest) / below.clamp(min=1e-12)).sqrt()


def _stacked(batch: Batch, names: str | Sequence[str], key: str) -> torch.Tensor:
    """Return a field in torch's default dtype, or several as the channels of one tensor."""
    if isinstance(names, str):
        return in_default_dtype(field(batch, names, key))
    fields = [in_default_dtype(field(batch, name, key)) for name in names]
    if len({each.shape for each in fields}) > 1:
        shapes = ", ".join(f"{n} {tuple(f.shape)}" for n, f in zip(names, fields, strict=True))
        raise ConfigError(f"{key}={[*names]}: the fields of a list have one shape; here {shapes}")
    return torch.stack(fields, 1)
