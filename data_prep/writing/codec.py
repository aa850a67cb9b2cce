"""`--codec auto`: try every codec on a few samples of the source, and choose one by a rule.

The rule:
1. A codec must save a quarter of the bytes, and one core must read it at 500 MB/s or more. At that
   rate a few cores decode faster than a node gets data from a shared file system, and the loader
   decodes in threads.
2. Among the codecs whose size is within 5 % of the smallest, the one that is read fastest wins.
3. gzip is chosen only if no other codec meets 1., because it takes many times as long to write.
4. If no codec meets 1., the shards are not compressed: they are then mapped, need no core to
   decode, and a single sample is read alone.

The speeds depend on the machine and its load. So the choice is made once, and is kept in the job
and in the provenance of the index. The parts of a job array get it as options.
"""

import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from data_prep.source import BadRecords, Source
from data_prep.writing.job import JOB, begun
from hpctrain.errors import ConfigError, DamageError, DataError
from hpctrain.record import Count, Record, convert
from hpctrain.shards.commit import PARTIAL, storage_error
from hpctrain.shards.compression import LEVELS, Compression
from hpctrain.shards.format import ShardFiles
from hpctrain.shards.ragged import Ragged
from hpctrain.shards.sample_schema import check_batch, sample_nbytes
from hpctrain.shards.storage.cache import ChunkCache
from hpctrain.shards.storage.chunks import Chunked
from hpctrain.shards.storage.plain import Plain
from hpctrain.shards.types import Array

PIECES, PIECE_BYTES = 4, 4 * 2**20  # the first PIECE_BYTES of PIECES pieces are tried
SAVES, FLOOR_MB_S, NEAR = 0.25, 500, 0.05  # the numbers of the rule
_REPEATS = 3


@dataclass(frozen=True)
class Trial:
    """The result of trying a codec."""

    compression: Compression  # the codec
    size: float  # the bytes in the file per byte of samples
    mb_s: float  # the speed at which one core reads samples, in MB/s


class _Chosen(Record, frozen=True):
    """A codec, and why it was chosen; as in the provenance."""

    codec: str
    level: int | None
    chunk_bytes: Count
    why: str

    @classmethod
    def of(cls, compression: Compression, why: str) -> "_Chosen":
        """Return the choice of a compression."""
        return cls(**asdict(compression), why=why)


def recorded(out: Path, fingerprint: str) -> _Chosen | None:
    """Return the choice of the job that was begun in `out`, or None if there is no such job."""
    try:
        plan = begun(out)
    except DataError:  # the job itself says so, unless it is replaced
        return None
    if plan is None or plan.fingerprint != fingerprint:
        return None
    path = out / PARTIAL / JOB
    try:
        return convert(_Chosen, plan.provenance.get("compression"), path)
    except DamageError as error:
        raise DataError(f"{error}; remove {path.parent} to begin anew") from None


def choose(source: Source, asked: Compression, *, quiet: bool = False) -> _Chosen:
    """Try the codecs on a few samples, print the results, and return the choice and its reason."""
    batches = list(_samples(source))
    if not batches:
        return _Chosen.of(replace(asked, codec="none"), "there are no samples to try")
    trials: list[Trial] = []
    reasons: dict[str, str] = {}
    for codec in LEVELS:
        try:
            compression = Compression(codec, chunk_bytes=asked.chunk_bytes)
            compression.check(source.fields)
        except (ConfigError, DataError) as error:  # no hdf5plugin; samples too large for a chunk
            reasons[codec] = str(error)
        else:
            trials.append(trial(source, batches, compression))
    best, why = decide(trials)
    if not quiet:
        tried = sum(int(sample_nbytes(batch, source.fields).sum()) for batch in batches)
        print(f"codecs on {tried / 1e6:.1f} MB of samples, read by one core:")
        for each in trials:
            mark = "*" if each.compression == best else " "
            print(f"{mark} {each.compression!s:18}{each.size:7.1%} {each.mb_s:9,.0f} MB/s")
        for codec, reason in reasons.items():
            print(f"  {codec:18}not tried: {reason}")
        print(f"--codec auto takes {best}: {why}")
    return _Chosen.of(best, why)


def decide(trials: list[Trial]) -> tuple[Compression, str]:
    """Apply the rule of this module to trials; the first trial must be without compression."""
    good = [each for each in trials[1:] if each.size <= 1 - SAVES and each.mb_s >= FLOOR_MB_S]
    if not good:
        why = f"nothing saves {SAVES:.0%} and is read at {FLOOR_MB_S} MB/s by one core"
        return trials[0].compression, why
    good = [each for each in good if each.compression.codec != "gzip"] or good
    smallest = min(each.size for each in good)
    best = max((each for each in good if each.size <= smallest + NEAR), key=lambda e: e.mb_s)
    why = (
        f"it saves {1 - best.size:.0%} (needed: {SAVES:.0%}), one core reads {best.mb_s:,.0f} MB/s "
        f"(needed: {FLOOR_MB_S}); the fastest of those within {NEAR:.0%} of the smallest"
    )
    return best.compression, why


def trial(
    source: Source, batches: list[dict[str, Array | Ragged]], compression: Compression
) -> Trial:
    """Write samples as a shard, and read it as the loader does."""
    try:
        with tempfile.TemporaryDirectory(prefix="data_prep-") as folder:
            files = ShardFiles(Path(folder), source.fields, 2**62, compression)
            for batch in batches:
                files.add("sample", batch)
            ((shard,), _) = files.finish()
            size, raw, seconds = _read(Path(folder, shard.path))
    except OSError as error:
        raise storage_error(Path(tempfile.gettempdir()), error) from None
    return Trial(compression, size / raw, raw / seconds / 1e6)


def _samples(source: Source) -> Iterator[dict[str, Array | Ragged]]:
    """Yield samples: a few MB from the beginning of each of a few pieces."""
    count = len(source.pieces)
    for number in sorted({i * count // PIECES for i in range(min(PIECES, count))}):
        room = PIECE_BYTES
        for block in source.read(source.pieces[number].what, BadRecords("skip")):
            rows = check_batch(block.values, source.fields)
            ends = np.cumsum(sample_nbytes(rows, source.fields))
            stop = min(int(np.searchsorted(ends, room)) + 1, len(ends))
            if stop:
                yield {name: _first(value, stop) for name, value in rows.items()}
                room -= int(ends[stop - 1])
            if room <= 0:
                break


def _first(value: Array | Ragged, count: int) -> Array | Ragged:
    """Return a copy of the first samples, which does not keep the whole block in memory."""
    if isinstance(value, Ragged):
        rows = value.rows(0, count)
        return Ragged(rows.values.copy(), rows.offsets)
    return value[:count].copy()


def _read(path: Path) -> tuple[int, int, float]:
    """Return the bytes in the file, the bytes of the samples, and the seconds to read them."""
    with h5py.File(path, "r", locking=False) as file:
        datasets: list[h5py.Dataset] = []
        file.visititems(lambda _, found: datasets.append(found) if _has_values(found) else None)
        stored = sum(dataset.id.get_storage_size() for dataset in datasets)
        outs = [np.empty(dataset.shape, dataset.dtype) for dataset in datasets]
        seconds = []
        for _ in range(_REPEATS):
            cache = ChunkCache()  # a new cache holds no decoded chunks
            readers = [_reader(dataset, path, cache) for dataset in datasets]
            start = time.thread_time()  # not the wall clock: other programs may be busy
            for reader, out in zip(readers, outs, strict=True):
                reader.copy(0, len(out), out)
            seconds.append(time.thread_time() - start)
    return stored, sum(out.nbytes for out in outs) or 1, min(seconds)


def _has_values(found: Any) -> bool:
    return isinstance(found, h5py.Dataset) and bool(found.size)


def _reader(dataset: h5py.Dataset, path: Path, cache: ChunkCache) -> Chunked | Plain:
    if dataset.chunks:
        return Chunked(dataset, path, cache=cache)
    offset, shape = dataset.id.get_offset(), dataset.shape[1:]
    return Plain(path, dataset.name, offset, dataset.dtype.name, shape)
