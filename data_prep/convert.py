"""The road of every command that writes: look at OUT, do the pieces, put them together.

    source ── pieces ─┬─ read, check, split ── shards ─┐
                      ├─ …                             ├─ finalize ── OUT/*.h5, index.json
                      └─ …                             ┘

OUT that holds the same already is left as it is. Who was killed continues with the pieces that
are missing, and the result has the same bytes.
"""

import hashlib
import json
import shutil
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from platform import python_version

import h5py
import numpy as np

import hpctrain
from data_prep import processes
from data_prep.finalize import BESIDE, REPORT, finalize, summary
from data_prep.job import Job, JobFolder, Plan
from data_prep.options import Options
from data_prep.passes import choices
from data_prep.piece import Choice, Converter, Progress
from data_prep.progress import Progress as ProgressBar
from data_prep.source import Source
from data_prep.split import ByColumn, ByFile, Fractions
from hpctrain.data import commit
from hpctrain.data import index as index_file
from hpctrain.data.index import Index
from hpctrain.data.schema import check_fields
from hpctrain.data.shard import digest_file
from hpctrain.errors import ConfigError, DataError, StorageError


def convert(source: Source, out: Path, options: Options) -> Index | None:
    """Write `source` into the folder `out`, unless it is there already.

    Returns:
        The index; None when only a part was written.

    Raises:
        ConfigError: Options that the source cannot meet.
        DataError: `out` holds something else, or the source is not usable.
        StorageError: `out` cannot be written, or has too little room.
    """
    _check(source, options)
    plan = _plan(source, options)
    existing = _existing(out)
    if existing is not None:
        damage = _damage(existing, out)
        if not damage and existing.provenance.get("fingerprint") == plan.fingerprint:
            if not options.quiet:
                print(f"{out} already holds this data set: {existing.digest}")
            return existing
        if not options.overwrite:
            what = damage or f"{out} holds another data set, {existing.digest}"
            raise DataError(f"{what}; --overwrite replaces it")
    with Job(out, plan, shared=options.part is not None) as job:
        done = job.pieces.done()
        todo = [number for number in _share(len(source.pieces), options) if number not in done]
        _check_room(source, todo, out)
        _run(Converter(source, options), job, todo)
        if options.part is not None:
            if not options.quiet:
                print(_part_done(job, options))
            return None
        index = finalize(job)
    if not options.quiet:
        print(f"{out}: {summary(index)}")
    return index


def _run(converter: Converter, job: Job, todo: list[int]) -> None:
    source, options = converter.source, converter.options
    pieces = [source.pieces[number] for number in todo]
    counts = [piece.samples for piece in pieces]
    known = [count for count in counts if count is not None]
    with ProgressBar(
        samples=sum(known) if len(known) == len(counts) else None,
        nbytes=sum(piece.bytes for piece in pieces),
        quiet=options.quiet,
    ) as progress:
        chosen: dict[int, Choice] = {}
        if options.dedup != "none" or options.stratify:
            chosen = choices(converter, job)
        task = _Write(converter, job.pieces, chosen)
        for _ in processes.run(task, todo, options.workers, progress.advance):
            pass


@dataclass(frozen=True)
class _Write:
    """A worker's task."""

    converter: Converter
    folder: JobFolder
    choices: dict[int, Choice]

    def __call__(self, number: int, progress: Progress) -> None:
        self.converter.write(self.folder, number, self.choices.get(number, Choice()), progress)


def _check(source: Source, options: Options) -> None:
    """See that source and options fit together.

    Raises:
        ConfigError: They do not.
    """
    check_fields(source.fields)
    split = options.split
    if isinstance(split, ByColumn) and split.column not in source.columns:
        has = ", ".join(source.columns) or "none"
        raise ConfigError(
            f"--split {split}: {source.name} has no such column to go by; it has {has}"
        )
    if isinstance(split, ByFile):
        for piece in source.pieces:
            for file in piece.files:
                split.of_file(file.path)
    if not options.stratify:
        return
    field = source.fields.get(options.stratify)
    if field is None or field.shape or field.variable or field.dtype.startswith("float"):
        have = ", ".join(f"{name} {field}" for name, field in source.fields.items())
        raise ConfigError(
            f"--stratify {options.stratify!r}: it is a field with one whole number per sample; "
            f"there are {have}"
        )
    if not isinstance(split, Fractions) or len(split.fractions) < 2:
        raise ConfigError(f"--stratify needs fractions to split by; --split is {split}")


def _share(pieces: int, options: Options) -> range:
    """The pieces of this part."""
    if options.part is None:
        return range(pieces)
    i, n = options.part
    return range(pieces * (i - 1) // n, pieces * i // n)


def _part_done(job: Job, options: Options) -> str:
    assert options.part is not None
    done, i, n = job.pieces.done(), *options.part
    mine = len(_share(job.plan.pieces, options))
    left = job.plan.pieces - len(done)
    then = (
        f"{left} pieces of other parts are missing" if left else "all parts are there"
    ) + f"; then: python -m data_prep finalize {job.out}"
    return f"{job.out}: part {i}/{n} is done, {mine} of {job.plan.pieces} pieces; {then}"


def _plan(source: Source, options: Options) -> Plan:
    files = [file for piece in source.pieces for file in piece.files]
    identity = {
        "name": source.name,
        "identity": source.identity,
        "files": [(file.size, file.mtime_ns) for file in files],
        "fields": {name: asdict(field) for name, field in source.fields.items()},
        "pieces": len(source.pieces),
        "options": options.of_result,
    }
    content = json.dumps(identity, sort_keys=True).encode()
    fingerprint = hashlib.blake2b(content, digest_size=16).hexdigest()
    split = options.split
    return Plan(
        fingerprint=fingerprint,
        pieces=len(source.pieces),
        splits=list(
            split.fractions
            if isinstance(split, Fractions)
            else split.patterns
            if isinstance(split, ByFile)
            else []
        ),
        fields=source.fields,
        categories=source.categories,
        provenance={
            "command": options.command,
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "versions": {
                "hpctrain": hpctrain.__version__,
                "python": python_version(),
                "numpy": np.__version__,
                "h5py": h5py.version.version,
                "hdf5": h5py.version.hdf5_version,
            },
            "options": options.of_result,
            "source": {"name": source.name, "files": len(files), **source.about},
            "fingerprint": fingerprint,
        },
        on_error=options.on_error,
        beside=source.beside,
    )


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
    if (out / commit.PARTIAL / commit.MOVES).exists():  # killed while it was moved into place
        with Job(out, None):
            commit.resume(out)
        return _existing(out)
    if index_file.FILE in names:
        return Index.load(out)
    if names - {REPORT} and commit.PARTIAL not in names:
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
    for name, digest in index.provenance.get(BESIDE, {}).items():
        try:
            same = digest_file(out / name) == digest
        except OSError:
            same = False
        if not same:
            return f"{out / name} is missing or changed"
    return ""


def _check_room(source: Source, todo: list[int], out: Path) -> None:
    needed = sum(source.pieces[number].bytes for number in todo)
    free = shutil.disk_usage(out).free
    if needed > free:
        raise StorageError(
            f"{out}: {needed / 1e9:.1f} GB are to be written, {free / 1e9:.1f} GB are free there"
        )
