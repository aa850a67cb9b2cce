"""The types that the modules of `hpctrain.data` share; importing them does not import torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch

Array: TypeAlias = NDArray[Any]
"""An array of any dtype."""

Int64s: TypeAlias = NDArray[np.int64]
"""An array of int64: indices, positions, counts or offsets."""

Batch: TypeAlias = "dict[str, torch.Tensor]"
"""Field name to tensor, with the samples along the first axis."""

SHARD_FORMAT = "hpctrain-shard"
SHARD_VERSION = 1
"""The attributes of a shard in our format: see `hpctrain.data.shards.shard`."""
