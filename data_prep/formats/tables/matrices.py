"""Many columns of numbers, converted together.

A table may have 100,000 columns. What one call for each column and batch costs would then be all
of the time.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np

from data_prep.formats.samples import lost
from data_prep.formats.tables.columns import Column
from hpctrain.shards.types import Array

MANY = 16  # columns of one type; fewer are converted one by one


def numbers_of(batch: Any, columns: Sequence[Column]) -> dict[str, Array]:
    """Return an array (n,) of the field's dtype for each column that can be converted together.

    These are columns of single numbers, without nulls, that the fields can hold. `Column.problems`
    would find nothing in them, and `Column.values` would return the same.
    """
    from pyarrow import types

    places = {name: place for place, name in enumerate(batch.schema.names)}
    groups = defaultdict[tuple[Any, str], list[str]](list)
    for column in columns if len(columns) >= MANY and batch.num_rows else ():
        number = types.is_integer(column.type) or types.is_floating(column.type)
        if number and column.categories is None and not batch[places[column.name]].null_count:
            groups[column.type, column.field.dtype].append(column.name)
    found: dict[str, Array] = {}
    for (_, dtype), names in groups.items():
        if len(names) < MANY:
            continue
        tensor = batch.select([places[name] for name in names]).to_tensor(row_major=False)
        matrix = tensor.to_numpy()
        bad = np.any(lost(matrix, np.dtype(dtype)), axis=0)
        with np.errstate(all="ignore"):  # the columns with such values are left out
            matrix = matrix.astype(dtype, copy=False)
        found |= {name: matrix[:, i] for i, name in enumerate(names) if not bad[i]}
    return found
