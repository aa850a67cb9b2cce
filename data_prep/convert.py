"""The road that every converter shares: look at OUT, stream the source, write the index.

A source is data with a schema; its digest is that of what it yields, taken on the way. OUT that
holds the same source in shards of the same size is left as it is.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from platform import python_version
from typing import Any

import h5py
import numpy as np
import xxhash
from numpy.typing import NDArray

import hpctrain
from data_prep.options import Options
from data_prep.progress import track
from hpctrain.data import index as index_file
from hpctrain.data.format import PARTIAL, ShardWriter
from hpctrain.data.index import Field, Index
from hpctrain.errors import DataError, StorageError

Array = NDArray[Any]
Batch = Mapping[str, Array | Sequence[Array]]


@dataclass(frozen=True)
class Source:
    """What a converter reads.

    Attributes:
        name: For people.
        fields: The schema.
        batches: Called once for each pass: yields (split, samples), always the same.
        total: Number of samples, when known beforehand.
        about: For the provenance; may be filled while `batches` runs.
    """

    name: str
    fields: Mapping[str, Field]
    batches: Callable[[], Iterator[tuple[str, Batch]]]
    total: int | None = None
    about: dict[str, Any] = field(default_factory=dict)


def convert(source: Source, out: Path, options: Options) -> Index:
    """Write `source` into the folder `out`, unless it is there already.

    Raises:
        DataError: `out` holds something else, or the source is not usable.
        StorageError: `out` cannot be written.
    """
    existing = _existing(out)
    if existing is not None:
        damage = _damage(existing, out)
        if not damage and _holds(existing, source, options):
            if not options.quiet:
                print(f"{out} already holds this data set: {existing.digest}")
            return existing
        if not options.overwrite:
            what = damage or f"{out} holds another data set, {existing.digest}"
            raise DataError(f"{what}; --overwrite replaces it")
    digest = SourceDigest(source.fields)
    with ShardWriter(out, source.fields, options.shard_bytes) as writer:
        batches = source.batches() if options.quiet else track(source.batches(), source.total)
        for split, batch in batches:
            digest.add(split, batch)
            writer.add(split, batch)
        index = writer.finish(_provenance(source, options, digest))
    if not options.quiet:
        print(f"{out}: {summary(index)}")
    return index


def summary(index: Index) -> str:
    """`1797 samples (train 1415, val 382) in 2 shards, 0.2 MB, xxh3_128:…`."""
    counts = {name: index.split(name).count for name in index.splits}
    size = sum(shard.bytes for shard in index.shards) / 1e6
    shards = "1 shard" if len(index.shards) == 1 else f"{len(index.shards)} shards"
    splits = ", ".join(f"{name} {count}" for name, count in counts.items())
    return f"{sum(counts.values())} samples ({splits}) in {shards}, {size:.1f} MB, {index.digest}"


class SourceDigest:
    """Names what a source yields: each split's fields, however they are batched."""

    def __init__(self, fields: Mapping[str, Field]) -> None:
        self._schema = str(sorted((name, str(field)) for name, field in fields.items()))
        self._parts: dict[str, xxhash.xxh3_128] = {}

    def add(self, split: str, batch: Batch) -> None:
        """Take in some samples."""
        for name, value in batch.items():
            part = self._parts.setdefault(f"{split}/{name}", xxhash.xxh3_128())
            if isinstance(value, np.ndarray):
                part.update(np.ascontiguousarray(value).data)
                continue
            for sample in value:
                part.update(len(sample).to_bytes(8, "little"))
                part.update(np.ascontiguousarray(sample).data)

    def __str__(self) -> str:
        parts = sorted((key, part.hexdigest()) for key, part in self._parts.items())
        return "xxh3_128:" + xxhash.xxh3_128_hexdigest(f"{self._schema}{parts}".encode())


def _existing(out: Path) -> Index | None:
    """The data set in `out`, or None when there is room for one.

    Raises:
        DataError: `out` holds something that is not ours to replace.
    """
    try:
        names = {path.name for path in out.iterdir()}
    except FileNotFoundError:
        return None
    except NotADirectoryError:
        raise DataError(f"{out} is a file; OUT is a folder") from None
    except OSError as error:
        raise StorageError(f"{out} cannot be read: {error.strerror}") from None
    if index_file.FILE in names:
        return Index.load(out)
    if names and PARTIAL not in names:
        raise DataError(
            f"{out} is not empty and holds no data set (there is {min(names)!r}); give an empty "
            "or new folder"
        )
    return None


def _damage(index: Index, out: Path) -> str:
    """What is wrong with the data set in `out`, or nothing."""
    try:
        index.check(out)
    except DataError as error:
        return str(error)
    return ""


def _holds(index: Index, source: Source, options: Options) -> bool:
    """Whether the data set is what this source and these options would give."""
    recorded = index.provenance
    if recorded.get("options") != _result_options(options) or "source" not in recorded:
        return False
    digest = SourceDigest(source.fields)
    for split, batch in source.batches():
        digest.add(split, batch)
    return bool(recorded["source"].get("digest") == str(digest))


def _result_options(options: Options) -> dict[str, Any]:
    return {"shard_bytes": options.shard_bytes}


def _provenance(source: Source, options: Options, digest: SourceDigest) -> dict[str, Any]:
    return {
        "command": options.command,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {
            "hpctrain": hpctrain.__version__,
            "python": python_version(),
            "numpy": np.__version__,
            "h5py": h5py.version.version,
            "hdf5": h5py.version.hdf5_version,
        },
        "options": _result_options(options),
        "source": {"name": source.name, "digest": str(digest), **source.about},
    }
