"""Packed numbers: scaled ones, values that mean "missing", and casts to another dtype.

The CF conventions of NetCDF (sections 8.1 and 2.5.1) are applied wherever the attributes are found:
a value is stored * scale_factor + add_offset, computed in the attributes' dtype (float64 if that
is an integer). A stored value that equals _FillValue or missing_value is missing, and so is one
outside of valid_range, or below valid_min or above valid_max. (xarray ignores these three; netCDF4
does not.) If the values are packed integers and the bounds are floats, they are bounds of the
unpacked values.
"""

import base64
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpctrain.errors import DataError
from hpctrain.shards.types import Array

BOUNDS = ("valid_range", "valid_min", "valid_max")
ATTRIBUTES = ("scale_factor", "add_offset", "_FillValue", "missing_value", "_Unsigned", *BOUNDS)


@dataclass(frozen=True, slots=True)
class Packing:
    """How stored numbers are read.

    Attributes:
        stored: The stored dtype.
        dtype: The dtype of the unpacked values.
        scale: Factor of the stored value; None if the values are not scaled.
        offset: Number added after scaling.
        missing: Stored values that mean "missing".
        unsigned: Whether the stored bits are an unsigned integer.
        lowest: Smaller values are missing; None: there is no such bound.
        highest: Larger values are missing; None: there is no such bound.
        bounds_unpacked: Whether these are bounds of the unpacked values.
    """

    stored: str
    dtype: str
    scale: float | None = None
    offset: float = 0.0
    missing: tuple[float, ...] = ()
    unsigned: bool = False
    lowest: float | None = None
    highest: float | None = None
    bounds_unpacked: bool = False

    @classmethod
    def of(
        cls, what: str, stored: Any, attributes: Mapping[str, Any], *, text: bool = False
    ) -> "Packing":
        """Make the packing that an array's attributes describe; text has none.

        Raises:
            DataError: An attribute is not a number.
        """
        stored = np.dtype(stored)
        if text:
            return cls(stored.str, "uint8")
        unsigned = str(attributes.get("_Unsigned", "")).lower() == "true" and stored.kind == "i"
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
        floats = [np.asarray(attributes[n]).dtype.kind == "f" for n in BOUNDS if n in attributes]
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
        gone: Any = None
        for value in self.missing:
            equal = array == array.dtype.type(value)
            if equal.any():
                gone = equal if gone is None else gone | equal
        if self.unsigned:
            array = array.view(array.dtype.str.replace("i", "u"))
        outside = None if self.bounds_unpacked else self._outside(array)
        if self.scale is not None:
            array = array.astype(self.dtype)  # a copy
            array *= array.dtype.type(self.scale)
            array += array.dtype.type(self.offset)
        if self.bounds_unpacked:
            outside = self._outside(array)
        if outside is not None:
            gone = outside if gone is None else gone | outside
        if gone is not None and array.dtype.kind == "f":
            array = np.where(gone, np.array(np.nan, array.dtype), array)
            gone = None
        return array, gone

    def _outside(self, array: Array) -> Any:
        """Return a mask of the values outside of the bounds; None if there are none."""
        outside: Any = None
        if self.lowest is not None:
            outside = array < self.lowest
        if self.highest is not None:
            above = array > self.highest
            outside = above if outside is None else outside | above
        return outside if outside is not None and outside.any() else None


def _bounds(
    what: str, attributes: Mapping[str, Any], stored: np.dtype[Any], *, unsigned: bool
) -> tuple[float | None, float | None]:
    """Return the lowest and the highest valid value, None without one."""
    found: list[float | None] = [None, None]
    for name in (each for each in BOUNDS if each in attributes):
        values = np.asarray(attributes[name]).reshape(-1)
        if values.dtype.kind not in "iuf" or len(values) != (2 if name == "valid_range" else 1):
            kind = "two numbers" if name == "valid_range" else "a number"
            raise DataError(f"{what}: its {name} {attributes[name]!r} is not {kind}")
        if stored.kind == "f":  # rounded as the values are
            values = values.astype(stored)
        elif unsigned and values.dtype.kind != "f":  # the same bits
            values = values.astype(stored).view(stored.str.replace("i", "u"))
        numbers = [None if value != value else value for value in values.tolist()]
        places = {"valid_range": (0, 1), "valid_min": (0,), "valid_max": (1,)}[name]
        for place, number in zip(places, numbers, strict=True):
            found[place] = number
    return found[0], found[1]


def _values(what: str, name: str, value: Any, stored: np.dtype[Any]) -> list[Any]:
    """Return an attribute's values, without those that the stored dtype cannot hold."""
    if isinstance(value, str) and stored.kind == "f":  # the form that xarray writes into Zarr
        try:
            return [struct.unpack("<d", base64.b64decode(value))[0]]
        except (ValueError, struct.error):
            pass
    values = np.asarray(value).reshape(-1)
    if values.dtype.kind not in "iuf":
        raise DataError(f"{what}: its {name} {value!r} is not a number")
    if stored.kind == "f":
        return [float(number) for number in values.astype(stored)]
    low, high = (0, 1) if stored.kind == "b" else (np.iinfo(stored).min, np.iinfo(stored).max)
    return [int(n) for n in values.tolist() if low <= n <= high and n == int(n)]
