"""The fields of a batch that a transform changes."""

from collections.abc import Sequence

import torch

from hpctrain.base.errors import ConfigError
from hpctrain.data.draws import Draws
from hpctrain.data.shards.types import Batch

Names = str | Sequence[str]

DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name)
    for name in ("uint8", "int32", "int64", "float16", "bfloat16", "float32", "float64")
}


class OfFields:
    """A `Transform` that changes some fields, each by itself."""

    random = False

    def __init__(self, fields: Names) -> None:
        self._fields = (fields,) if isinstance(fields, str) else tuple(fields)

    def __call__(self, batch: Batch, draws: Draws) -> Batch:
        """See `hpctrain.data.transforms.Transform`."""
        return batch | {name: self._changed(name, field_of(batch, name)) for name in self._fields}

    def _changed(self, name: str, values: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


def dtype_of(name: str) -> torch.dtype:
    """Return the dtype of one of the names in DTYPES."""
    if name not in DTYPES:
        raise ConfigError(f"dtype {name!r}: it is one of {', '.join(DTYPES)}")
    return DTYPES[name]


def field_of(batch: Batch, name: str) -> torch.Tensor:
    """Return a field that a transform wants."""
    if name not in batch:
        raise ConfigError(f"a transform wants field {name!r}; the batch has {', '.join(batch)}")
    return batch[name]


def image_of(batch: Batch, name: str) -> torch.Tensor:
    """Return a field of images, (b, channels, height, width)."""
    image = field_of(batch, name)
    if image.ndim != 4:
        raise ConfigError(
            f"a transform wants images (b, channels, height, width); {name!r} is "
            f"{list(image.shape)}"
        )
    return image
