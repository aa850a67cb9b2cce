"""Transforms of the numbers of a field: another dtype, and mean 0 and deviation 1."""

import copy
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hpctrain.base.errors import ConfigError, DataError
from hpctrain.data.batch_fields import Names, OfFields, dtype_of
from hpctrain.data.shards.index import Statistics


class Cast(OfFields):
    """Converts fields to another dtype.

    Args:
        dtype: Name of the dtype: uint8, int32, int64, float16, bfloat16, float32 or float64.
        fields: The fields; "image" by default.

    Raises:
        ConfigError: The dtype is unknown.
    """

    def __init__(self, dtype: str, fields: Names = "image") -> None:
        super().__init__(fields)
        self._dtype = dtype_of(dtype)

    def _changed(self, name: str, values: torch.Tensor) -> torch.Tensor:
        return values.to(self._dtype)


class Normalise(OfFields):
    """Replaces x by (x - mean) / std.

    Args:
        mean: One number, or one for each channel, in the units of the field (0 to 255 for
            uint8). Without mean and std, `bind` takes both from the index.
        std: One number, or one for each channel, each above 0.
        fields: The fields; "image" by default.
        dtype: Floating-point dtype of the result. The arithmetic has this dtype, but at least
            float32. None is torch's default dtype: float32, or float64 with precision=fp64.

    Raises:
        ConfigError: Only one of mean and std is given, their lengths differ, a std is not above
            0, or the dtype is not a floating-point one.
    """

    def __init__(
        self,
        mean: float | Sequence[float] | None = None,
        std: float | Sequence[float] | None = None,
        fields: Names = "image",
        dtype: str | None = None,
    ) -> None:
        super().__init__(fields)
        self._dtype = torch.get_default_dtype() if dtype is None else dtype_of(dtype)
        if not self._dtype.is_floating_point:
            raise ConfigError(f"Normalise dtype {dtype!r}: it is a floating-point one")
        if (mean is None) != (std is None):
            raise ConfigError("Normalise needs both mean and std, or neither (those of the index)")
        self._moments: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        if mean is not None and std is not None:
            self._moments = dict.fromkeys(self._fields, _checked(mean, std))
        self._ready: dict[tuple[Any, ...], tuple[torch.Tensor, torch.Tensor]] = {}

    def bind(self, statistics: Mapping[str, Statistics]) -> "Normalise":
        """Return this transform with mean and std of the index, unless they were given."""
        if self._moments:
            return self
        bound = copy.copy(self)
        bound._moments, bound._ready = {}, {}
        for name in self._fields:
            found = statistics.get(name)
            if found is None or found.mean is None or not found.std:
                raise DataError(
                    f"Normalise: the index has no usable mean and std of field {name!r} "
                    f"({found or 'it has ' + (', '.join(statistics) or 'none')}): give both"
                )
            bound._moments[name] = _checked(found.mean, found.std)
        return bound

    def _changed(self, name: str, values: torch.Tensor) -> torch.Tensor:
        if name not in self._moments:
            raise ConfigError(f"Normalise of {name!r} has no mean and std: give them, or bind it")
        wide = torch.float32 if self._dtype.itemsize < 4 else self._dtype
        key = name, wide, values.device, values.ndim
        if key not in self._ready:
            shape = (-1, *[1] * (values.ndim - 2))
            mean, std = (numbers.to(wide) for numbers in self._moments[name])
            if mean.numel() > 1:
                if values.ndim < 2 or values.shape[1] != mean.numel():
                    raise ConfigError(
                        f"Normalise has {mean.numel()} channels, {name!r} is "
                        f"{list(values.shape)}: give one number, or one a channel (axis 1)"
                    )
                mean, std = mean.view(shape), std.view(shape)
            self._ready[key] = mean.to(values.device), (1 / std).to(values.device)
        mean, factor = self._ready[key]
        # The difference comes first: where the mean is large, the product would lose digits.
        return (values.to(wide) - mean).mul_(factor).to(self._dtype)


def _checked(
    mean: float | Sequence[float], std: float | Sequence[float]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return both as float64, (1,) or (channels,)."""
    pair = [
        torch.tensor(x if isinstance(x, Sequence) else [x], dtype=torch.float64)
        for x in (mean, std)
    ]
    if pair[0].shape != pair[1].shape or not all(
        math.isfinite(m) and s > 0 for m, s in zip(*(x.tolist() for x in pair), strict=True)
    ):
        raise ConfigError(
            f"Normalise mean {mean} and std {std}: finite numbers, as many, every std above 0"
        )
    return pair[0], pair[1]
