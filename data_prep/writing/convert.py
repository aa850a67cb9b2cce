"""Convert a source into a data set: look at OUT, write the pieces, put them together.

    source ── pieces ─┬─ read, check, split ── shards ─┐
                      ├─ …                             ├─ finalize ── OUT/*.h5, index.json
                      └─ …                             ┘

If OUT already holds the same data set, it is left as it is. After an interruption the same command
writes only the pieces that are missing, and the result has the same bytes.
"""

import hashlib
import json
import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

from data_prep import processes
from data_prep.console import size
from data_prep.formats.opening import naming
from data_prep.options import Options
from data_prep.source import InputSource
from data_prep.writing import commit
from data_prep.writing.finalize import BESIDE, REPORT, finalize, made_by, summary
from data_prep.writing.job import WAIT_S, Conversion
from data_prep.writing.passes import choose
from data_prep.writing.piece import Converter, FirstPassError
from data_prep.writing.records import ConversionPlan
from data_prep.writing.sample_schema import check_fields
from data_prep.writing.split import ByColumn, ByFile, Fractions
from hpctrain.base.errors import ConfigError, DataError, StorageError
from hpctrain.base.terminal.progress_bar import ProgressBar as ProgressBar
from hpctrain.data.shards import index as index_file
from hpctrain.data.shards.index import Index
from hpctrain.data.shards.shard import digest_file


def convert(source: InputSource, out: Path, options: Options) -> Index | None:
    """Write `source` into the folder `out`, unless `out` already holds the same data set.

    Return the index; None when only a part was written.
    """
    with naming(source.folders):
        options.compression.check(check_fields(source.fields))
    if options.by_own and source.own:
        options = replace(options, split=ByColumn(source.own))
    _check_apart(source, out)
    with naming(source.folders):
        _check_split(source, options)
    plan = _plan(source, options)
    parts = options.part is not None
    commit.settle(out, wait=WAIT_S if parts else 0)
    if (found := _finished(out, plan, options)) is not None:
        return found
    with _folder(out), Conversion(out, shared=parts) as job:
        if (found := _finished(out, plan, options)) is not None:
            return found  # another process has finished it before this one got the lock
        job.begin(plan, overwrite=options.overwrite)
        _do(Converter(source, options), job)
        if parts and not _is_last(job, options):
            job.keep()
            return None
        index = finalize(job)
    if not options.quiet:
        print(f"{out}: {summary(index)}")
    return index


@contextmanager
def _folder(out: Path) -> Iterator[None]:
    """Make the folder `out`; at the end, remove what was made for it and is still empty."""
    made = [folder for folder in (out, *out.parents) if not folder.exists()]
    try:
        with commit.writable(out):
            out.mkdir(parents=True, exist_ok=True)
        yield
    finally:
        with suppress(OSError):
            for folder in made:
                folder.rmdir()


def _do(converter: Converter, job: Conversion) -> None:
    """Write the pieces that are missing: all of them, or those of this part."""
    source, options, total = converter.source, converter.options, job.plan.pieces
    share = range(total) if options.part is None else job.plan.share(options.part[0])
    done = job.pieces.done()
    todo = [number for number in share if number not in done]
    if len(todo) < len(share) and not options.quiet:
        there = len(share) - len(todo)
        print(f"{job.out}: goes on, {there} of {len(share)} pieces are there", file=sys.stderr)
    if options.compression.codec == "none":
        _check_room(source, todo, job.out)
    try:
        if options.two_passes and todo:
            with _progress(source, range(total), options, "first pass: ") as progress:
                converter = choose(converter, job, progress.advance)
        task, finish = partial(converter.write, job.pieces), partial(converter.finish, job.pieces)
        with _progress(source, todo, options) as progress:
            for _ in processes.run(task, todo, options.workers, progress.advance, finish):
                pass
    except FirstPassError:
        # What was seen is of no use for another --group or --split, or it was wrong, and with it
        # all pieces.
        commit.clear_leftovers(job.out)
        raise


def _progress(
    source: InputSource, numbers: Sequence[int], options: Options, label: str = ""
) -> ProgressBar:
    nbytes = sum(source.pieces[number].bytes for number in numbers)
    return ProgressBar(None, nbytes, label=label, quiet=options.quiet)


def _is_last(job: Conversion, options: Options) -> bool:
    """Return whether this part must put all parts together: no other part is left or running."""
    assert options.part is not None
    part, parts = options.part
    left = job.plan.pieces - len(job.pieces.done())
    if not left and job.alone():
        return True
    if not options.quiet:
        mine = len(job.plan.share(part))
        then = (
            f"{left} pieces of other parts are missing; the last part puts all together"
            if left
            else "all are there, and the last task at work puts them together; if none is: "
            f"python -m data_prep finalize {shlex.quote(str(job.out))}"
        )
        print(f"{job.out}: part {part}/{parts} is done, {mine} of {job.plan.pieces} pieces; {then}")
    return False


def _check_split(source: InputSource, options: Options) -> None:
    """Check that the source has what --split, --group and --stratify need."""
    split, group, fields = options.split, options.group, source.fields
    by_column = split.column if isinstance(split, ByColumn) else ""
    if by_column and by_column not in source.columns:
        has = ", ".join(source.columns) or "none"
        raise ConfigError(
            f"--split {split}: {source.name} has no such column to go by; it has {has}"
        )
    if isinstance(split, ByFile) and (files := [*source.split_files()]):
        split.of_files(files)
    if group and group not in fields:
        if group not in source.columns:
            columns = f", and the columns {', '.join(source.columns)}" if source.columns else ""
            raise ConfigError(
                f"--group {group}: {source.name} has no such field or column to go by; it has the "
                f"fields {', '.join(fields)}{columns}"
            )
        if by_column not in ("", group):
            raise ConfigError(
                f"--group {group} with --split {split}: of two columns, one has to be a field that "
                "is written"
            )
    if not options.stratify:
        return
    field = fields.get(options.stratify)
    if field is None or field.shape or field.variable or field.dtype.startswith("float"):
        have = ", ".join(f"{name} {field}" for name, field in fields.items())
        raise ConfigError(
            f"--stratify {options.stratify!r}: it is a field with one whole number per sample; "
            f"there are {have}"
        )
    if not isinstance(split, Fractions) or len(split.fractions) < 2:
        raise ConfigError(f"--stratify needs fractions to split by; --split is {split}")


def _check_apart(source: InputSource, out: Path) -> None:
    """Check that neither OUT nor the source is inside of the other."""
    target = out.resolve()
    files = (file for piece in source.pieces for file in piece.files)
    for folder in map(Path, {os.path.dirname(file.path) for file in files}):
        if target in (resolved := folder.resolve(), *resolved.parents):
            raise ConfigError(f"{folder} is read, and is inside of OUT, {out}; give another OUT")
    for folder in map(Path, source.folders):
        if folder.resolve() in (target, *target.parents):
            raise ConfigError(f"{folder} is read, and OUT, {out}, is inside of it; give another")


def _plan(source: InputSource, options: Options) -> ConversionPlan:
    files = list(dict.fromkeys(file for piece in source.pieces for file in piece.files))
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
    return ConversionPlan(
        fingerprint=fingerprint,
        pieces=len(source.pieces),
        splits=list(options.split.names),
        fields=source.fields,
        categories=source.categories,
        provenance={
            # All parts together write the same data set as one command.
            **made_by(re.sub(r" --part[ =]\d+/\d+", "", options.command)),
            "options": {**options.of_result, "on_error": options.on_error},
            "compression": options.compression.as_json(),
            "source": {
                "name": source.name,
                "files": len(files),
                "bytes": sum(file.size for file in files),
                **source.about,
            },
            "fingerprint": fingerprint,
        },
        on_error=options.on_error,
        parts=options.part[1] if options.part else 0,
        beside=source.beside,
        group=(options.group if options.group in source.fields else "") or source.group,
    )


def _finished(out: Path, plan: ConversionPlan, options: Options) -> Index | None:
    """Return the index of the data set in `out` if it is the one that the plan describes."""
    index = _existing(out)
    if index is None:
        return None
    problem = _damage(index, out)
    if not problem and index.provenance.get("fingerprint") == plan.fingerprint:
        skipped = index.told("left_out").get("unusable", 0)
        if not skipped or options.on_error == "skip":
            if not options.quiet:
                print(f"{out} already holds this data set: {index.digest}")
            return index
        problem = f"{out} holds this data set without {skipped} records that could not be used"
    commit.check_ours(out)
    if not options.overwrite:
        problem = problem or f"{out} holds another data set, {index.digest}"
        raise DataError(f"{problem}; --overwrite replaces it")
    return None


def _existing(out: Path) -> Index | None:
    """Return the index of the data set in `out`, or None when `out` is free for a new one."""
    try:
        names = set(os.listdir(out))
    except FileNotFoundError:
        return None
    except NotADirectoryError:
        raise DataError(f"{out} is a file; OUT is a folder") from None
    except OSError as error:
        raise StorageError(f"{out} cannot be read: {error.strerror}") from None
    if index_file.FILE in names:
        return Index.load(out)
    if names - {REPORT} and commit.PARTIAL not in names:
        raise DataError(
            f"{out} is not empty and holds no data set (there is {min(names)!r}); give an empty "
            "or new folder"
        )
    return None


def _damage(index: Index, out: Path) -> str:
    """Return what is wrong with the data set in `out`; "" when it is whole."""
    try:
        index.check(out)
    except DataError as error:
        return str(error)
    for name, digest in index.told(BESIDE).items():
        try:
            same = digest_file(out / name) == digest
        except OSError:
            same = False
        if not same:
            return f"{out / name} is missing or changed"
    return ""


def _check_room(source: InputSource, todo: list[int], out: Path) -> None:
    needed = sum(source.pieces[number].bytes for number in todo)
    free = shutil.disk_usage(out).free
    if needed > free:
        raise StorageError(f"{out}: {size(needed)} are to be written, {size(free)} are free there")
