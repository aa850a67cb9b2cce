"""One piece of a source: read, checked, given its splits, written as shards.

A function of the piece alone, so any process may do it, at any time, and do it again.
"""

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash
from numpy.typing import NDArray

from data_prep.job import Choice, JobFolder, Problem, Result
from data_prep.options import Options
from data_prep.processes import Progress
from data_prep.source import Block, Source
from data_prep.split import ByColumn, ByFile, Split, hash_keys
from hpctrain.data import commit
from hpctrain.data.field import check_name
from hpctrain.data.format import ShardFiles
from hpctrain.data.ragged import Array, Ragged, offsets_of
from hpctrain.data.schema import check_batch
from hpctrain.errors import DataError, StorageError

Rows = Mapping[str, Array | Ragged]


@dataclass(frozen=True)
class Converter:
    """Does pieces; sent to each process once."""

    source: Source
    options: Options

    def write(self, job: JobFolder, number: int, progress: Progress) -> Callable[[], Result]:
        """Write a piece.

        Returns:
            What waits for the disk, and has the piece be there then; it raises a StorageError.

        Raises:
            DataError: A record cannot be used (`on_error` "stop"), or a file was changed.
            StorageError: The disk is full or the folder not writable.
        """
        options = self.options
        with _written(job):
            folder = job.begin(number)
        with _written(job, folder):
            try:
                files = ShardFiles(
                    *(folder, self.source.fields, options.shard_bytes, options.compression),
                    sync=False,
                )
                choice = job.choice(number) if options.two_passes else None
                result = self._fill(files, job.fingerprint, number, choice, progress)
            except StorageError:  # or was it the source that was not there?
                for file in self.source.pieces[number].files:
                    file.check()
                raise

        def finish() -> Result:
            with _written(job, folder):
                for shard in result.shards:
                    commit.sync(folder / shard.path)
                job.finish(number, folder, result)
            return result

        return finish

    def _fill(
        self,
        files: ShardFiles,
        fingerprint: str,
        number: int,
        choice: Choice | None,
        progress: Progress,
    ) -> Result:
        digest, problems = _Digest(), Problems(self.options.on_error)
        seen = duplicates = 0
        for samples in self._samples(number, problems):
            first, seen = seen, seen + len(samples)
            if choice is None:
                names, numbers = samples.splits(self.options.split)
            elif seen > len(choice.keep):
                continue  # see below
            else:
                keep = choice.keep[first:seen]
                duplicates += len(samples) - int(keep.sum())
                samples = samples.only(keep)
                if not len(samples):
                    continue
                if choice.splits is None:
                    names, numbers = samples.splits(self.options.split)
                else:
                    names, numbers = choice.names, choice.splits[first:seen][keep]
            digest.add(samples.rows)
            for split, rows in _by_split(samples.rows, names, numbers):
                files.add(split, rows, lasting=True)
            progress(len(samples), _nbytes(samples.rows))
        if choice is not None and seen != len(choice.keep):
            raise NotTheSameError(
                f"{self.source.name}: the source gave {len(choice.keep)} samples of piece "
                f"{number} at first and {seen} the second time; it has to be the same each time"
            )
        shards, moments = files.finish()  # it may still read the source, where that is mapped
        for file in self.source.pieces[number].files:
            file.check()
        return Result(
            fingerprint=fingerprint,
            shards=shards,
            moments={
                split: {name: values.state() for name, values in fields.items()}
                for split, fields in moments.items()
            },
            digest=digest.digest(),
            duplicates=duplicates,
            leaks=0 if choice is None else choice.leaks,
            problems=problems.found,
            skipped=problems.skipped,
        )

    def look(self, job: JobFolder, number: int, progress: Progress) -> None:
        """Note of each sample what `passes` decides by."""
        stratify, dedup = self.options.stratify, self.options.dedup != "none"
        count, known = 0, dict[str, int]()
        contents: list[bytes] = []
        keys, strata, splits = [NO_KEYS], [NO_NUMBERS], [NO_NUMBERS]
        # A record that cannot be used is told of when it is written, unless it is the end.
        for samples in self._samples(number, Problems(self.options.on_error)):
            count += len(samples)
            if dedup:
                contents.append(b"".join(map(xxhash.xxh3_128_digest, samples.contents())))
                names, numbers = samples.splits(self.options.split)
                place = [known.setdefault(name, len(known)) for name in names]
                splits.append(np.array(place, np.int64)[numbers])
            if stratify:
                keys.append(hash_keys(samples.split_keys()))
                strata.append(np.asarray(samples.rows[stratify], np.int64))
            progress(len(samples), _nbytes(samples.rows))
        try:
            job.note_look(
                number,
                count=count,
                contents=np.frombuffer(b"".join(contents), np.uint64).reshape(-1, 2),
                names=np.array(list(known), str),
                splits=np.concatenate(splits),
                keys=np.concatenate(keys),
                strata=np.concatenate(strata),
            )
        except OSError as error:
            raise commit.storage_error(job.folder, error) from None

    def _samples(self, number: int, problems: "Problems") -> "Iterator[_Samples]":
        """The samples that can be used."""
        piece, split = self.source.pieces[number], self.options.split
        for file in piece.files:
            file.check()
        try:
            for block in self.source.read(piece.what, problems):
                samples = _Samples.of(block, self.source)
                if self.options.nan == "refuse":
                    samples = samples.finite(problems)
                if isinstance(split, ByColumn):
                    samples = samples.named(split, problems)
                if len(samples):
                    yield samples
        except OSError as error:  # of the source: what is written raises a StorageError
            raise DataError(
                f"{error.filename or self.source.name} cannot be read: {error.strerror or error}"
            ) from None


@contextmanager
def _written(job: JobFolder, folder: Path | None = None) -> Iterator[None]:
    """Say in whose folder the disk was full; a piece's `folder` goes when it fails."""
    try:
        yield
    except BaseException as error:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
        if isinstance(error, OSError):
            raise commit.storage_error(job.folder, error) from None
        raise


class NotTheSameError(DataError):
    """The second pass over the source saw something else than the first."""


class Problems:
    """Takes the records that cannot be used; see `data_prep.source.Reading`."""

    def __init__(self, on_error: str) -> None:
        self._on_error = on_error
        self.found: list[Problem] = []
        self.skipped: dict[str, int] = {}

    def bad(self, file: str, record: str, reason: str) -> None:
        """See `Reading`."""
        problem = Problem(file, record, reason)
        if self._on_error == "stop":
            raise DataError(f"{problem}; --on-error skip leaves such records out")
        self.found.append(problem)

    def skip(self, reason: str) -> None:
        """See `Reading`."""
        self.skipped[reason] = self.skipped.get(reason, 0) + 1


@dataclass(frozen=True)
class _Samples:
    """Samples of a block: `rows`, and which of the block's they are."""

    block: Block
    rows: Rows
    which: NDArray[np.int64]

    @classmethod
    def of(cls, block: Block, source: Source) -> "_Samples":
        """All, as the schema has them.

        Raises:
            DataError: It does not fit the schema.
        """
        try:
            rows = {
                name: _native(value)
                for name, value in check_batch(block.values, source.fields).items()
            }
            count = len(next(iter(rows.values())))
            for what in ("keys", "column", "records"):
                given = getattr(block, what)
                if given is not None and len(given) != count:
                    raise DataError(f"a block of {count} samples has {len(given)} {what}")
        except DataError as error:
            raise DataError(f"{block.file or source.name}: {error}") from None
        return cls(block, rows, np.arange(count))

    def __len__(self) -> int:
        return len(self.which)

    def only(self, mask: NDArray[np.bool_]) -> "_Samples":
        """Those where `mask`, (n,), is set."""
        if mask.all():
            return self
        return _Samples(self.block, _only(self.rows, mask), self.which[mask])

    def contents(self) -> list[bytes]:
        """The bytes of each sample's fields; of a sequence also its length."""
        parts = [
            _ragged_bytes(value) if isinstance(value, Ragged) else _bytes(value)
            for value in self.rows.values()
        ]
        return parts[0] if len(parts) == 1 else list(map(b"".join, zip(*parts, strict=True)))

    def split_keys(self) -> Sequence[bytes]:
        """What decides the split."""
        keys = self.block.keys
        if keys is None:
            return self.contents()
        return keys if len(self) == len(keys) else [keys[i] for i in self.which.tolist()]

    def splits(self, split: Split) -> tuple[Sequence[str], NDArray[np.intp]]:
        """The names of splits, and for each sample its split's place among them, (n,)."""
        if isinstance(split, ByColumn):
            column = self.block.column
            assert column is not None  # the source has it: see `convert`
            known: dict[str, int] = {}
            numbers = [known.setdefault(str(column[i]), len(known)) for i in self.which.tolist()]
            return list(known), np.array(numbers, np.intp)
        if isinstance(split, ByFile):
            return [split.of_file(self.block.file)], np.zeros(len(self), np.intp)
        if len(split.fractions) == 1:
            return list(split.fractions), np.zeros(len(self), np.intp)
        return list(split.fractions), split.numbers(hash_keys(self.split_keys()))

    def finite(self, problems: Problems) -> "_Samples":
        """Those without a value that is not finite."""
        good = np.ones(len(self), bool)
        for name, value in self.rows.items():
            array = value.values if isinstance(value, Ragged) else value
            if array.dtype.kind != "f" or np.isfinite(array).all():
                continue
            for i, sample in enumerate(value):
                bad = int((~np.isfinite(sample)).sum())
                if bad and good[i]:
                    good[i] = False
                    problems.bad(
                        *self._record(i), f"field {name!r} has {bad} NaN or infinite values"
                    )
        return self.only(good)

    def named(self, split: ByColumn, problems: Problems) -> "_Samples":
        """Those whose column names a split."""
        names, numbers = self.splits(split)
        reasons: dict[int, str] = {}
        for place, name in enumerate(names):
            try:
                check_name(name, f"column {split.column!r}: split")
            except DataError as error:
                reasons[place] = str(error)
        if not reasons:
            return self
        good = ~np.isin(numbers, list(reasons))
        for i in np.flatnonzero(~good).tolist():
            problems.bad(*self._record(i), reasons[int(numbers[i])])
        return self.only(good)

    def _record(self, i: int) -> tuple[str, str]:
        """What to call a sample: its file and record."""
        place = int(self.which[i])
        records = self.block.records
        return self.block.file, records[place] if records is not None else f"sample {place}"


class _Digest:
    """Of the samples, field by field, so that it does not depend on the blocks."""

    def __init__(self) -> None:
        self._fields: dict[str, xxhash.xxh3_128] = {}

    def add(self, rows: Rows) -> None:
        for name, value in rows.items():
            if isinstance(value, Ragged):
                self._add(f"{name}/lengths", value.lengths)
                self._add(f"{name}/values", value.values)
            else:
                self._add(name, value)

    def _add(self, name: str, array: Array) -> None:
        digest = self._fields.setdefault(name, xxhash.xxh3_128(name.encode()))
        digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)

    def digest(self) -> str:
        return "".join(digest.hexdigest() for digest in self._fields.values())


NO_KEYS, NO_NUMBERS = np.zeros(0, np.uint64), np.zeros(0, np.int64)


def _native(value: Array | Ragged) -> Array | Ragged:
    """In native byte order: equal samples have equal bytes."""
    array = value.values if isinstance(value, Ragged) else value
    if array.dtype.isnative:
        return value
    array = array.astype(array.dtype.newbyteorder("="))
    return Ragged(array, value.offsets) if isinstance(value, Ragged) else array


def _bytes(array: Array) -> list[bytes]:
    """Of each row; made at once, as a million of them would take long one by one."""
    rows = np.ascontiguousarray(array).reshape(len(array), -1)
    width = rows.itemsize * rows.shape[1]
    if width >= 2**31:
        return [row.tobytes() for row in rows]
    bytes_: list[bytes] = rows.view(f"V{width}").reshape(-1).tolist()
    return bytes_


def _ragged_bytes(value: Ragged) -> list[bytes]:
    return [len(sample).to_bytes(8, "little") + sample.tobytes() for sample in value]


def _only(rows: Rows, mask: NDArray[np.bool_]) -> Rows:
    chosen: dict[str, Array | Ragged] = {}
    for name, value in rows.items():
        if isinstance(value, Ragged):
            lengths = value.lengths
            chosen[name] = Ragged(value.values[np.repeat(mask, lengths)], offsets_of(lengths[mask]))
        else:
            chosen[name] = value[mask]
    return chosen


def _by_split(
    rows: Rows, names: Sequence[str], numbers: NDArray[np.intp]
) -> Iterator[tuple[str, Rows]]:
    """The samples of each split that has some, in the order of the names."""
    counts = np.bincount(numbers, minlength=len(names)).tolist()
    for place, name in enumerate(names):
        if counts[place]:
            yield name, rows if counts[place] == len(numbers) else _only(rows, numbers == place)


def _nbytes(rows: Rows) -> int:
    return sum(
        value.values.nbytes if isinstance(value, Ragged) else value.nbytes
        for value in rows.values()
    )
