"""Write a small data set for a test, as `data_prep` writes one, without a source or a command."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.writing.commit import (
    PARTIAL,
    check_ours,
    clear_leftovers,
    commit,
    discard,
    lock,
    unlock,
    writable,
)
from data_prep.writing.compression import Compression
from data_prep.writing.sample_schema import ArrayBatch, check_batch, check_fields
from data_prep.writing.shard_files import ShardFiles
from hpctrain.data.shards.field import Field, name_problem
from hpctrain.data.shards.index import Index
from hpctrain.errors import DataError

_NONE = Compression()


def write_shards(
    folder: Path,
    batches: Iterable[tuple[str, ArrayBatch]],
    *,
    fields: Mapping[str, Field] | None = None,
    max_bytes: int = 256 * 2**20,
    compression: Compression = _NONE,
    categories: Mapping[str, Sequence[str]] | None = None,
    provenance: Mapping[str, Any] | None = None,
) -> Index:
    """Write (split, batch) pairs as a data set; after an exception nothing of it is left.

    A finished data set in the folder stays until it is replaced at the end. `categories` are the
    names of the values 0, 1, … of some fields; `ShardFiles` explains the other arguments. Without
    `fields` the schema is that of the first batch: a list or a `Ragged` is a variable-length field.
    """
    folder = Path(folder)
    files: ShardFiles | None = None
    if fields is not None:
        compression.check(check_fields(fields))
    check_ours(folder)
    with writable(folder):
        folder.mkdir(parents=True, exist_ok=True)
        holder = lock(folder)
        clear_leftovers(folder)
    try:
        for split, batch in batches:
            if batch and not any(len(value) for value in batch.values()):
                continue
            if fields is None:
                fields = infer_fields(batch)
                compression.check(check_fields(fields))
            assert not name_problem(split, "split")
            rows = check_batch(batch, fields)
            files = files or ShardFiles(folder / PARTIAL, fields, max_bytes, compression)
            files.add(split, rows)
        if files is None or fields is None:
            raise DataError(f"nothing to write into {folder}: the source has no samples")
        shards, moments = files.finish()
        index = Index(
            fields=fields,
            shards=tuple(shards),
            statistics={
                split: {name: values.result() for name, values in found.items()}
                for split, found in moments.items()
            },
            provenance=dict(provenance or {}),
            categories=categories or {},
        )
        commit(folder, index, {shard.path: shard.path for shard in shards})
    except BaseException:
        with suppress(OSError):  # the disk may still be full; the next writer clears
            discard(folder)
        raise
    finally:
        unlock(holder)
    return index


def infer_fields(batch: ArrayBatch) -> dict[str, Field]:
    """Return the schema of a batch: a list or a `Ragged` is a variable-length field."""
    fields = {}
    for name, value in batch.items():
        array = value if isinstance(value, np.ndarray) else value[0]
        variable = not isinstance(value, np.ndarray)
        try:
            fields[name] = Field(array.dtype.newbyteorder("=").name, array.shape[1:], variable)
        except DataError as error:
            raise DataError(f"field {name!r}: {error}") from None
    return fields
