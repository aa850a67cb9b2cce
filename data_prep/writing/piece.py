"""Convert one piece of a source: read it, check it, assign the splits, and write the shards.

The result depends on the piece alone, so any process may convert it, at any time, and again.
"""

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from data_prep.options import Options
from data_prep.processes import Progress
from data_prep.source import BadRecords, InputSource
from data_prep.writing.block_samples import BlockSamples, by_split, nbytes_of
from data_prep.writing.commit import writable
from data_prep.writing.job import PIECE, JobFolder
from data_prep.writing.records import Result, as_json
from data_prep.writing.shard_files import ShardFiles
from data_prep.writing.split import ByColumn
from hpctrain.base.errors import DataError, StorageError
from hpctrain.base.terminal.terminal import few
from hpctrain.data.shards.ragged import hash_keys
from hpctrain.data.shards.types import Array

SHOWN = 3  # files that a message lists


@dataclass(frozen=True)
class Converter:
    """Converts pieces. It is sent to each worker process once."""

    source: InputSource
    options: Options
    counts: Sequence[int] = ()  # of the samples of each piece, if a first pass has seen them

    def write(self, job: JobFolder, number: int, progress: Progress) -> Path:
        """Write a piece into a folder of its own, which `finish` makes permanent."""
        options = self.options
        with writable(job.folder):
            folder = job.begin(number)
        with _whole(job, folder):
            try:
                files = ShardFiles(
                    folder, self.source.fields, options.shard_bytes, options.compression
                )
                result = self._fill(files, job, number, progress)
            except StorageError:  # perhaps only because the source is not there any more
                self._check_files(number)
                raise
            except MemoryError as error:
                raise self._too_large(number, error) from None
            (folder / PIECE).write_text(as_json(result), encoding="utf-8")
        return folder

    @staticmethod
    def finish(job: JobFolder, number: int, folder: Path) -> None:
        """Wait until a piece is on the disk, and make it permanent."""
        with _whole(job, folder):
            job.finish(number, folder)

    def _fill(self, files: ShardFiles, job: JobFolder, number: int, progress: Progress) -> Result:
        options, problems, seen = self.options, BadRecords(self.options.on_error), 0
        count = self.counts[number] if options.two_passes else None
        chosen, names = None, options.split.names
        if count is not None and options.decides_splits:
            chosen = job.chosen(sum(self.counts[:number]), count)
        for samples in self._samples(number, problems):
            first, seen = seen, seen + len(samples)
            if count is not None and seen > count:
                continue  # after the loop this raises an error
            of = samples.splits(options.split) if chosen is None else (names, chosen[first:seen])
            for split, rows in by_split(samples.rows, *of):
                files.add(split, rows)
            progress(len(samples), nbytes_of(samples.rows))
        if count is not None and seen != count:
            raise FirstPassError(
                f"{self.source.name}: the source gave {count} samples of piece "
                f"{number} at first and {seen} the second time; it has to be the same each time"
            )
        shards, moments = files.finish()  # a mapped source may still be read here
        self._check_files(number)
        return Result(
            fingerprint=job.fingerprint,
            shards=shards,
            moments=moments,
            problems=problems.found,
            skipped=problems.skipped,
        )

    def look(self, job: JobFolder, number: int, progress: Progress) -> None:
        """Write down what `passes` needs to know about each sample of a piece."""
        stratify, group = self.options.stratify, self.options.group
        count, numbering = 0, dict[str, int]()
        found: dict[str, list[Array]] = {
            **{name: [np.zeros(0, np.uint64)] for name in ("keys", "groups")},
            **{name: [np.zeros(0, np.int64)] for name in ("strata", "splits")},
        }
        # Records that cannot be used are reported when the piece is written, except with "stop".
        for samples in self._samples(number, BadRecords(self.options.on_error)):
            count += len(samples)
            if group:
                found["groups"].append(samples.groups(group))
            if not self.options.decides_splits:
                names, numbers = samples.splits(self.options.split)
                renumbered = [numbering.setdefault(name, len(numbering)) for name in names]
                found["splits"].append(np.array(renumbered, np.int64)[numbers])
            if stratify and not group:
                found["keys"].append(hash_keys(samples.split_keys()))
            if stratify:
                found["strata"].append(np.asarray(samples.rows[stratify], np.int64))
            progress(len(samples), nbytes_of(samples.rows))
        with writable(job.folder):
            arrays = {"count": np.array(count), "names": np.array(list(numbering), str)}
            job.note(number, arrays | {k: np.concatenate(parts) for k, parts in found.items()})

    def _too_large(self, number: int, error: MemoryError) -> DataError:
        which = few((file.path for file in self.source.pieces[number].files), SHOWN)
        return DataError(
            f"{which or self.source.name}: there is too little memory to convert it; fewer "
            f"--workers need less {error}".rstrip()
        )

    def _check_files(self, number: int) -> None:
        for file in self.source.pieces[number].files:
            file.check()

    def _samples(self, number: int, problems: BadRecords) -> Iterator[BlockSamples]:
        """Yield the samples of a piece that can be used."""
        split = self.options.split
        self._check_files(number)
        try:
            for block in self.source.read(self.source.pieces[number].what, problems):
                samples = BlockSamples.of(block, self.source)
                if self.options.nan == "refuse":
                    samples = samples.finite(problems)
                if isinstance(split, ByColumn):
                    samples = samples.named(split, problems)
                if len(samples):
                    yield samples
        except MemoryError as error:
            raise self._too_large(number, error) from None
        except OSError as error:  # reading failed: what is written raises a StorageError
            raise DataError(
                f"{error.filename or self.source.name} cannot be read: {error.strerror or error}"
            ) from None


@contextmanager
def _whole(job: JobFolder, folder: Path) -> Iterator[None]:
    """Remove a piece's `folder` on errors; one of writing names the job's folder."""
    try:
        with writable(job.folder):
            yield
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


class FirstPassError(DataError):
    """What a first pass has seen is of no use: the source has changed, or groups do not fit."""
