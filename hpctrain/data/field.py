"""One field of the samples: what its values are, and where in a shard they lie. No numpy."""

import math
import re
from dataclasses import asdict, dataclass, field
from typing import Any

from hpctrain.errors import DataError

# Little-endian in the file. No bool, complex, string or object, and no uint64, which torch
# cannot compute with: store uint8, two fields, UTF-8 bytes, int64.
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
"""And the bytes of each."""
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


@dataclass(frozen=True, slots=True)
class Field:
    """The schema of one field.

    Attributes:
        dtype: One of DTYPES.
        shape: Of one sample; of one element of a sample when the length varies.
        variable: Whether a sample is a sequence of any length of such elements.
        dataset: Path in the file, where it is not that of `hpctrain.data.format`, else "".
        offsets: The same for the offsets of a variable-length field.
        axis: Of the dataset, that counts the samples.

    Fields are equal when their samples are alike, wherever they lie.
    """

    dtype: str
    shape: tuple[int, ...] = ()
    variable: bool = False
    dataset: str = field(default="", compare=False)
    offsets: str = field(default="", compare=False)
    axis: int = field(default=0, compare=False)

    def __post_init__(self) -> None:
        """Refuse what no shard can hold.

        Raises:
            DataError: An unknown dtype, a shape without elements, or an axis that cannot be.
        """
        if self.dtype not in DTYPES:
            raise DataError(f"dtype {self.dtype} is not supported; allowed: {', '.join(DTYPES)}")
        if any(size < 1 for size in self.shape):
            raise DataError(f"shape {list(self.shape)} has no elements; every size must be >= 1")
        if not 0 <= self.axis <= (0 if self.variable else len(self.shape)):
            kind = "variable-length samples" if self.variable else f"samples {list(self.shape)}"
            raise DataError(f"axis {self.axis} cannot count {kind}")

    def as_json(self) -> dict[str, Any]:
        """What the index holds of it."""
        values = asdict(self)
        return {
            key: value
            for key, value in values.items()
            if key in ("dtype", "shape", "variable") or value
        }

    @property
    def nbytes(self) -> int:
        """Bytes of a sample; where its length varies, of one element."""
        return DTYPES[self.dtype] * math.prod(self.shape)

    @property
    def elsewhere(self) -> bool:
        """Whether it lies where only version 2 can say."""
        return bool(self.dataset or self.offsets or self.axis)

    def datasets(self, name: str) -> tuple[str, str]:
        """Paths in the file: of the values, and of the offsets ("" where there are none)."""
        if not self.variable:
            return self.dataset or name, ""
        return self.dataset or f"{name}/values", self.offsets or f"{name}/offsets"

    def __str__(self) -> str:
        """`uint8[3, 64, 64]`, `uint8[*]` (variable length)."""
        sizes = [*(["*"] if self.variable else []), *map(str, self.shape)]
        return f"{self.dtype}[{', '.join(sizes)}]" if sizes else self.dtype


def check_name(name: str, what: str) -> None:
    """Refuse a field's or split's name that is not portable in files and HDF5.

    Raises:
        DataError: With the name and what is allowed.
    """
    if not NAME.fullmatch(name):
        raise DataError(
            f"{what} {name!r}: a name has letters, digits, '_', '-' and '.' and starts with "
            "none of the last two"
        )
