"""Checks that samples have the fields of the data set's schema, and no others."""

from collections.abc import Mapping, Sequence

import numpy as np

from hpctrain.base.errors import DataError
from hpctrain.data.shards.field import Field, name_problem
from hpctrain.data.shards.ragged import Ragged
from hpctrain.data.shards.types import Array, Int64s

_RESERVED = "mask"  # the loader's own key in a batch
_ADDED = ("_length", "_offsets")  # the loader adds FIELD_length or FIELD_offsets to its batches
_CURE = "--field (arrays, webdataset), --rename (table) or the function (python) gives another name"

ArrayBatch = Mapping[str, Array | Ragged | Sequence[Array]]


def check_fields(fields: Mapping[str, Field]) -> dict[str, Field]:
    """Check the names of fields."""
    if not fields:
        raise DataError("a data set needs at least one field")
    for name, field in fields.items():
        if problem := name_problem(name, "field"):
            raise DataError(f"{problem}; {_CURE}")
        if added := [name + more for more in _ADDED if field.variable and name + more in fields]:
            raise DataError(f"the loader adds {added[0]!r} for the lengths of {name!r}; {_CURE}")
    if _RESERVED in fields:
        raise DataError(
            f"a field cannot be named {_RESERVED!r}, because each batch of the loader has a mask "
            f"of its rows with that name; {_CURE}"
        )
    return dict(fields)


def check_batch(batch: ArrayBatch, fields: Mapping[str, Field]) -> dict[str, Array | Ragged]:
    """Return the batch in the order of the schema, each variable-length field as a `Ragged`.

    The values are in native byte order, so that equal samples have equal bytes.
    """
    if set(batch) != set(fields):
        raise DataError(
            f"a batch has the fields {', '.join(sorted(batch))}; the data set has "
            f"{', '.join(sorted(fields))}"
        )
    rows: dict[str, Array | Ragged] = {}
    for name, field in fields.items():
        value = batch[name]
        if field.variable and not isinstance(value, Ragged):
            value = _joined(name, field, value)
        elif not isinstance(value, Ragged):
            value = np.asarray(value)
        array = value.values if isinstance(value, Ragged) else value
        variable = isinstance(value, Ragged)
        dtype = array.dtype.newbyteorder("=").name  # the byte order may differ
        if (dtype, array.shape[1:], variable) != (field.dtype, field.shape, field.variable):
            found = f"{dtype} {list(array.shape[1:])}{' of variable length' * variable}"
            raise DataError(f"field {name!r}: found samples of {found}, the data set has {field}")
        if not array.dtype.isnative:
            array = array.astype(array.dtype.newbyteorder("="))
            value = Ragged(array, value.offsets) if isinstance(value, Ragged) else array
        rows[name] = value
    counts = {name: len(value) for name, value in rows.items()}
    if len(set(counts.values())) != 1:
        raise DataError(f"the fields of a batch have different numbers of samples: {counts}")
    return rows


def _joined(name: str, field: Field, samples: Sequence[Array] | Array) -> Ragged:
    for sample in samples:
        if sample.dtype.newbyteorder("=") != field.dtype or sample.shape[1:] != field.shape:
            raise DataError(
                f"field {name!r}: found a sample {sample.dtype.name} {list(sample.shape)}, the "
                f"data set has {field}"
            )
    return Ragged.of(list(samples))


def sample_nbytes(rows: Mapping[str, Array | Ragged], fields: Mapping[str, Field]) -> Int64s:
    """Return the data bytes of each sample, int64 (n,)."""
    sizes = np.zeros(len(next(iter(rows.values()))), np.int64)
    for name, value in rows.items():
        element = fields[name].nbytes
        sizes += value.lengths * element + 8 if isinstance(value, Ragged) else element
    return sizes
