"""One piece of a source: read, checked, given its splits, written as shards.

A function of the piece alone, so any process may do it, at any time, and do it again.
"""

import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from data_prep.job import JobFolder, Problem, Result
from data_prep.options import Options
from data_prep.source import Block, Source
from data_prep.split import ByColumn, ByFile, Fractions
from hpctrain.data.format import ShardFiles
from hpctrain.data.ragged import Array, Ragged
from hpctrain.data.schema import check_batch
from hpctrain.errors import DataError

Progress = Callable[[int, int], None]  # samples, bytes: more


@dataclass(frozen=True)
class Choice:
    """What two passes decided of a piece's samples.

    Attributes:
        keep: bool (n,), or None: all.
        splits: Names (n,), or None: each sample's own matter.
    """

    keep: NDArray[np.bool_] | None = None
    splits: Sequence[str] | None = None


@dataclass(frozen=True)
class Converter:
    """Does pieces; sent to each process once."""

    source: Source
    options: Options

    def write(self, job: JobFolder, number: int, choice: Choice, progress: Progress) -> Result:
        """Write a piece.

        Raises:
            DataError: A record cannot be used (`on_error` "stop"), or a file was changed.
            StorageError: The disk is full or the folder not writable.
        """
        piece, folder = self.source.pieces[number], job.begin(number)
        try:
            files = ShardFiles(folder, self.source.fields, self.options.shard_bytes)
            digest, counts = xxhash.xxh3_128(), _Counts()
            problems = Problems(self.options.on_error)
            for samples in self._samples(number, problems):
                rows, splits = samples.rows, samples.splits(self.options, choice, counts.seen)
                keep = None if choice.keep is None else choice.keep[counts.seen :][: len(samples)]
                counts.seen += len(samples)
                if keep is not None and not keep.all():
                    counts.duplicates += int((~keep).sum())
                    rows = _chosen(rows, np.flatnonzero(keep))
                    splits = [s for s, kept in zip(splits, keep, strict=True) if kept]
                _digest(digest, rows, splits)
                for split, part in _by_split(rows, splits):
                    files.add(split, part)
                progress(len(samples), sum(_nbytes(value) for value in rows.values()))
            for file in piece.files:
                file.check()
            shards, moments = files.finish()
            states = {
                split: {name: values.state() for name, values in fields.items()}
                for split, fields in moments.items()
            }
            result = Result(
                shards=shards,
                moments=states,
                digest=f"xxh3_128:{digest.hexdigest()}",
                samples=counts.seen - counts.duplicates,
                duplicates=counts.duplicates,
                problems=problems.found,
                source_bytes=sum(file.size for file in piece.files),
                skipped=problems.skipped,
            )
            job.finish(number, folder, result)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        return result

    def look(self, job: JobFolder, number: int, progress: Progress) -> None:
        """Note the content's hash of each sample of a piece, its key's, and its stratum."""
        contents: list[bytes] = []
        keys: list[int] = []
        strata: list[Any] = []
        for samples in self._samples(number, Problems("skip")):
            contents += [xxhash.xxh3_128_digest(content) for content in samples.contents()]
            keys += [xxhash.xxh3_64_intdigest(key) for key in samples.split_keys()]
            if self.options.stratify:
                strata += np.asarray(samples.rows[self.options.stratify]).tolist()
            progress(len(samples), 0)
        path = job.look(number)
        unfinished = path.with_name(f".{path.name}")
        with unfinished.open("wb") as file:
            np.savez(
                file,
                contents=np.frombuffer(b"".join(contents), "V16"),
                keys=np.array(keys, np.uint64),
                strata=np.array(strata),
            )
        unfinished.replace(path)

    def _samples(self, number: int, problems: "Problems") -> "Iterator[_Samples]":
        """The samples that can be used."""
        piece = self.source.pieces[number]
        for file in piece.files:
            file.check()
        for block in self.source.read(piece.what, problems):
            rows = check_batch(block.values, self.source.fields)
            samples = _Samples(block, rows, np.arange(len(next(iter(rows.values())))))
            if self.options.nan == "refuse":
                samples = samples.finite(problems)
            if len(samples):
                yield samples


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


@dataclass
class _Counts:
    seen: int = 0
    duplicates: int = 0


@dataclass(frozen=True)
class _Samples:
    """Samples of a block: `rows`, and which of the block's they are."""

    block: Block
    rows: dict[str, Array | Ragged]
    which: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.which)

    def contents(self) -> list[bytes]:
        """The bytes of each sample's fields; of a sequence also its length."""
        parts: list[bytearray] = [bytearray() for _ in range(len(self))]
        for value in self.rows.values():
            for part, sample in zip(parts, value, strict=True):
                if isinstance(value, Ragged):
                    part += len(sample).to_bytes(8, "little")
                part += np.asarray(sample, order="C").tobytes()
        return [bytes(part) for part in parts]

    def split_keys(self) -> list[bytes]:
        """What decides the split."""
        keys = self.block.keys
        return self.contents() if keys is None else [keys[i] for i in self.which.tolist()]

    def splits(self, options: Options, choice: Choice, first: int) -> list[str]:
        """The split of each."""
        split = options.split
        if choice.splits is not None:
            return list(choice.splits[first : first + len(self)])
        if isinstance(split, ByFile):
            return [split.of_file(self.block.file)] * len(self)
        if isinstance(split, ByColumn):
            column = self.block.column
            assert column is not None  # the source has it: see `convert`
            return [str(column[i]) for i in self.which.tolist()]
        assert isinstance(split, Fractions)
        if len(split.fractions) == 1:
            return [*split.fractions] * len(self)
        return split.of_keys(self.split_keys())

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
                    record = self.block.records[i] if self.block.records else f"sample {i}"
                    problems.bad(
                        self.block.file, record, f"field {name!r} has {bad} NaN or infinite values"
                    )
        kept = np.flatnonzero(good)
        return _Samples(self.block, _chosen(self.rows, kept), self.which[kept])


def _chosen(rows: dict[str, Array | Ragged], which: NDArray[np.int64]) -> dict[str, Any]:
    return {
        name: [value[i] for i in which] if isinstance(value, Ragged) else value[which]
        for name, value in rows.items()
        if len(which)
    }


def _by_split(rows: dict[str, Any], splits: list[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    names = list(dict.fromkeys(splits))
    if len(names) == 1:
        yield names[0], rows
        return
    place = np.array(splits)
    for name in names:
        yield name, _chosen(rows, np.flatnonzero(place == name))


def _digest(digest: xxhash.xxh3_128, rows: dict[str, Any], splits: list[str]) -> None:
    """Take in samples, however they are batched: sample by sample would be slow, so by field."""
    for name, value in rows.items():
        digest.update(f"{name}{len(splits)}".encode())
        arrays = [value.values, value.lengths] if isinstance(value, Ragged) else [value]
        for array in arrays if not isinstance(value, list) else value:
            digest.update(np.ascontiguousarray(array).data)


def _nbytes(value: Any) -> int:
    if isinstance(value, Ragged):
        return value.values.nbytes
    return sum(map(_nbytes, value)) if isinstance(value, list) else int(value.nbytes)
