"""One field of the samples: its dtype and shape, and where it lies in a shard. No numpy."""

import math
import re
from dataclasses import dataclass, field
from typing import Any

from hpctrain.base.errors import DataError
from hpctrain.base.files.record import Count

# Little-endian in the file. Other values are stored as one of these: bool as uint8, complex numbers
# as two fields, strings as UTF-8 bytes, uint64 (torch cannot compute with it) as int64.
DTYPES = {
    "uint8": 1,
    "uint16": 2,
    "uint32": 4,
    "int8": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
    "float16": 2,
    "float32": 4,
    "float64": 8,
}
"""The dtypes that a field may have, and the bytes of a value."""
MAX_AXES = 32  # of a dataset in HDF5, with the one that counts the samples
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


@dataclass(frozen=True, slots=True)
class Field:
    """The schema of one field, whose keys `hpctrain.data.shards.index` describes.

    `shape` is that of one sample; of one element if samples are `variable`, of any length. Two
    fields are equal if their samples are of one kind, wherever in a file they lie.
    """

    dtype: str
    shape: tuple[Count, ...] = ()
    variable: bool = False
    dataset: str = field(default="", compare=False)
    offsets: str = field(default="", compare=False)
    axis: Count = field(default=0, compare=False)

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise DataError(f"dtype {self.dtype} is not supported; allowed: {', '.join(DTYPES)}")
        if any(size < 1 for size in self.shape):
            raise DataError(f"shape {list(self.shape)} has no elements; every size must be >= 1")
        if len(self.shape) >= MAX_AXES:
            raise DataError(
                f"{len(self.shape)} axes are too many for a sample; HDF5 allows {MAX_AXES - 1}"
            )
        if not 0 <= self.axis <= (0 if self.variable else len(self.shape)):
            kind = "variable-length samples" if self.variable else f"samples {list(self.shape)}"
            raise DataError(f"axis {self.axis} cannot count {kind}")

    def as_json(self) -> dict[str, Any]:
        """Return what the index holds of the field."""
        always = ("dtype", "shape", "variable")
        values = {key: getattr(self, key) for key in self.__slots__}
        return {key: value for key, value in values.items() if key in always or value}

    @property
    def nbytes(self) -> int:
        """Bytes of a sample; of one element if the length varies."""
        return DTYPES[self.dtype] * math.prod(self.shape)

    @property
    def elsewhere(self) -> bool:
        """Whether the field does not lie where `hpctrain.data.shards.shard` says."""
        return bool(self.dataset or self.offsets or self.axis)

    def datasets(self, name: str) -> tuple[str, str]:
        """Return the paths in the file of the values and of the offsets ("" for a fixed size)."""
        if not self.variable:
            return self.dataset or name, ""
        return self.dataset or f"{name}/values", self.offsets or f"{name}/offsets"

    def __str__(self) -> str:
        """`uint8[3, 64, 64]`, `uint8[*]` (variable length)."""
        sizes = [*(["*"] if self.variable else []), *map(str, self.shape)]
        return f"{self.dtype}[{', '.join(sizes)}]" if sizes else self.dtype


def name_problem(name: str, what: str) -> str:
    """Return why the name of a field or split is not portable in file names and HDF5, or ""."""
    if NAME.fullmatch(name):
        return ""
    return (
        f"{what} {name!r}: a name has letters, digits, '_', '-' and '.' and starts with none of "
        "the last two"
    )
