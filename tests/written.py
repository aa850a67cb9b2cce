"""Write a small data set for a test, as `data_prep` writes one, without a source or a command."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from hpctrain.data.shards.commit import (
    PARTIAL,
    check_ours,
    clear_leftovers,
    commit,
    discard,
    lock,
    storage_error,
    unlock,
)
from hpctrain.data.shards.compression import Compression
from hpctrain.data.shards.field import Field
from hpctrain.data.shards.format import MAX_BYTES, ShardFiles
from hpctrain.data.shards.index import Index
from hpctrain.data.shards.sample_schema import ArrayBatch
from hpctrain.data.shards.shard import NONE
from hpctrain.errors import DataError


def write_shards(
    folder: Path,
    batches: Iterable[tuple[str, ArrayBatch]],
    *,
    fields: Mapping[str, Field] | None = None,
    max_bytes: int = MAX_BYTES,
    compression: Compression = NONE,
    categories: Mapping[str, Sequence[str]] | None = None,
    provenance: Mapping[str, Any] | None = None,
) -> Index:
    """Write (split, batch) pairs as a data set; after an exception nothing of it is left.

    A finished data set in the folder stays until it is replaced at the end. `categories` are the
    names of the values 0, 1, … of some fields; `ShardFiles` explains the other arguments.
    """
    folder = Path(folder)
    files = ShardFiles(folder / PARTIAL, fields, max_bytes, compression)
    check_ours(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        holder = lock(folder)
        clear_leftovers(folder)
    except OSError as error:
        raise storage_error(folder, error) from None
    try:
        for split, batch in batches:
            files.add(split, batch)
        shards, moments = files.finish()
        if not shards:
            raise DataError(f"nothing to write into {folder}: the source has no samples")
        index = Index(
            fields=files.fields,
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
