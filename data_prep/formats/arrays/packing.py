"""Packed numbers: scaled ones, values that mean "missing", and casts to another dtype.

The CF conventions of NetCDF (sections 8.1 and 2.5.1) are applied wherever the attributes are found:
a value is stored * scale_factor + add_offset, computed in the attributes' dtype (float64 if that
is an integer). A stored value that equals _FillValue or missing_value is missing, and so is one
outside of valid_range, or below valid_min or above valid_max. (xarray ignores these three; netCDF4
does not.) If the values are packed integers and the bounds are floats, they are bounds of the
unpacked values.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpctrain.data.shards.types import Array
from hpctrain.errors import DataError

# Which of the lowest (0) and highest valid value an attribute has.
_PLACES = {"valid_range": (0, 1), "valid_min": (0,), "valid_max": (1,)}
ATTRIBUTES = ("scale_factor", "add_offset", "_FillValue", "missing_value", "_Unsigned", *_PLACES)


@dataclass(frozen=True, slots=True)
class Packing:
    """How stored numbers are read."""

    stored: str  # the stored dtype
    dtype: str  # the dtype of the unpacked values
    scale: float | None = None  # factor of the stored value; None if the values are not scaled
    offset: float = 0.0  # number added after scaling
    missing: tuple[float, ...] = ()  # stored values that mean "missing"
    unsigned: bool = False  # whether the stored bits are an unsigned integer
    lowest: float | None = None  # smaller values are missing; None: there is no such bound
    highest: float | None = None  # larger values are missing; None: there is no such bound
    bounds_unpacked: bool = False  # whether these are bounds of the unpacked values

    @classmethod
    def of(
        cls, what: str, stored: Any, attributes: Mapping[str, Any], *, text: bool = False
    ) -> "Packing":
        """Make the packing that an array's attributes describe; text has none."""
        stored = np.dtype(stored)
        if text:
            return cls(stored.str, "uint8")
        unsigned = attributes.get("_Unsigned", b"")
        unsigned = unsigned if isinstance(unsigned, bytes) else str(unsigned).encode()
        unsigned = unsigned.lower() == b"true" and stored.kind == "i"
        missing: list[float] = []
        for name in ("_FillValue", "missing_value"):
            if name in attributes:
                values = _values(what, name, attributes[name], stored)
                missing += [value for value in values if not math.isnan(value)]
        dtype = np.dtype(stored.str.replace("i", "u")) if unsigned else stored
        factors = {
            name: np.asarray(attributes[name]).reshape(-1)
            for name in ("scale_factor", "add_offset")
            if name in attributes
        }
        for name, value in factors.items():
            if len(value) != 1 or value.dtype.kind not in "iuf" or not np.isfinite(value[0]):
                raise DataError(f"{what}: its {name} {attributes[name]!r} is not a number")
        scale = float(factors["scale_factor"][0]) if "scale_factor" in factors else 1.0
        offset = float(factors["add_offset"][0]) if "add_offset" in factors else 0.0
        packed = (scale, offset) != (1.0, 0.0)
        if packed:
            kinds = [value.dtype if value.dtype.kind == "f" else "f8" for value in factors.values()]
            dtype = np.result_type(dtype, *kinds)
        lowest, highest = _bounds(what, attributes, stored, unsigned=unsigned)
        floats = [np.asarray(attributes[n]).dtype.kind == "f" for n in _PLACES if n in attributes]
        return cls(
            stored.str,
            dtype.newbyteorder("=").str,
            scale if packed else None,
            offset,
            tuple(sorted(set(missing))),
            unsigned,
            lowest,
            highest,
            packed and stored.kind != "f" and any(floats),
        )

    def read(self, array: Array) -> tuple[Array, NDArray[np.bool_] | None]:
        """Return the unpacked values, and a mask of the missing ones (None if there are none).

        Missing floats are NaN and not in the mask.
        """
        masks = [array == array.dtype.type(value) for value in self.missing]
        if self.unsigned:
            array = array.view(array.dtype.str.replace("i", "u"))
        if not self.bounds_unpacked:
            masks += self._outside(array)
        if self.scale is not None:
            array = array.astype(self.dtype)  # a copy
            array *= array.dtype.type(self.scale)
            array += array.dtype.type(self.offset)
        if self.bounds_unpacked:
            masks += self._outside(array)
        masks = [mask for mask in masks if mask.any()]
        if not masks:
            return array, None
        gone = np.logical_or.reduce(masks)
        if array.dtype.kind == "f":
            return np.where(gone, np.array(np.nan, array.dtype), array), None
        return array, gone

    def _outside(self, array: Array) -> list[Array]:
        """Return masks of the values beyond each of the bounds."""
        masks = [] if self.lowest is None else [array < self.lowest]
        return masks if self.highest is None else [*masks, array > self.highest]


def _bounds(
    what: str, attributes: Mapping[str, Any], stored: np.dtype[Any], *, unsigned: bool
) -> tuple[float | None, float | None]:
    """Return the lowest and the highest valid value, None without one."""
    found: list[float | None] = [None, None]
    for name, places in _PLACES.items():
        if name not in attributes:
            continue
        values = np.asarray(attributes[name]).reshape(-1)
        if values.dtype.kind not in "iuf" or len(values) != len(places):
            kind = "two numbers" if len(places) == 2 else "a number"
            raise DataError(f"{what}: its {name} {attributes[name]!r} is not {kind}")
        if stored.kind == "f":  # rounded as the values are
            values = values.astype(stored)
        elif unsigned and values.dtype.kind != "f":  # the same bits
            values = values.astype(stored).view(stored.str.replace("i", "u"))
        for place, number in zip(places, values.tolist(), strict=True):
            found[place] = None if number != number else number
    return found[0], found[1]


def _values(what: str, name: str, value: Any, stored: np.dtype[Any]) -> list[Any]:
    """Return an attribute's values, without those that the stored dtype cannot hold."""
    values = np.asarray(value).reshape(-1)
    if values.dtype.kind not in "iuf":
        raise DataError(f"{what}: its {name} {value!r} is not a number")
    if stored.kind == "f":
        return [float(number) for number in values.astype(stored)]
    low, high = (0, 1) if stored.kind == "b" else (np.iinfo(stored).min, np.iinfo(stored).max)
    return [int(n) for n in values.tolist() if low <= n <= high and n == int(n)]
