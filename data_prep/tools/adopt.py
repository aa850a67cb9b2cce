"""Adopt HDF5 files in place: check them, read them once, and write index.json. Nothing is copied.

    python -m data_prep index run-*.h5 --field image=/x/data --field label=/y
    python -m data_prep index FOLDER --field image=data --axis image=-1 --split train=a*,val=b*
    python -m data_prep index corpus/*.h5 --field text=/tokens:/offsets

FILE is an HDF5 file, or a folder: then its *.h5 and *.hdf5 files are taken, sorted by name. Every
storage layout is supported: contiguous, in chunks, compressed, of either byte order; `repack`
writes a faster one. All files must have the same fields. The samples are in the order of the files.
After a change of a file the index is no longer valid.

A FILE that is a symbolic link stands for its target. The target must lie in the folder of the
index, because copies of that folder must contain it. Links, virtual datasets and external storage
inside HDF5 must not lead to another file, because the digest of the file would not cover the
samples. A file is refused if values of it were never written (--unwritten NAME takes the fill value
for them), and if HDF5 would read other values than the loader, because its list of chunks is
damaged.
"""

import argparse
import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from data_prep import processes
from data_prep.formats.files import in_folders
from data_prep.formats.hdf5.foreign import FieldSource, described, look
from data_prep.formats.hdf5.survey import survey
from data_prep.options import pairs
from data_prep.source import SourceFile
from data_prep.writing.commit import PARTIAL, writable
from data_prep.writing.finalize import made_by, statistics_of, summary
from data_prep.writing.sample_schema import check_fields
from data_prep.writing.split import ByFile, parse_split
from hpctrain.base.errors import ConfigError, DataError, StorageError
from hpctrain.base.terminal.progress_bar import ProgressBar
from hpctrain.data.shards import index as index_file
from hpctrain.data.shards.field import Field, name_problem
from hpctrain.data.shards.index import Index, Shard

SUFFIXES = (".h5", ".hdf5")

ARGUMENTS = """
files=FILE+ : path
    HDF5 file, or a folder of them
--field NAME=DATASET ...
    a field and its dataset in the files, or NAME=VALUES:OFFSETS if its samples have different
    lengths
--axis NAME=K ...
    the axis of the samples in the dataset of a field, from 0; -1 is the last
--unwritten NAME ...
    take the fill value for values of this field that were never written
--split SPLIT = train
    one split for all files, or NAME=PATTERN,… by the names of the files
--out FOLDER : path
    folder of index.json (default: the files' folder)
--workers N : positive
    number of worker processes (default: the number of cores)
--overwrite
    replace another index.json
--quiet
    print errors only
"""


def run(args: argparse.Namespace) -> None:
    """Write the index of HDF5 files into their folder, unless the same index is there already."""
    fields = _parse_fields(args.field, args.axis, args.unwritten, args.files)
    workers = args.workers or len(os.sched_getaffinity(0))
    folder, paths = _located(args.files, args.out)
    splits = _splits(args.split, paths)
    schema, counts = _schema(folder, paths, fields)
    sources = [SourceFile.of(folder / path) for path in paths]
    of_files = [(path, s.size, s.mtime_ns) for path, s in zip(paths, sources, strict=True)]
    of_fields = {name: field.as_json() for name, field in schema.items()}
    content = json.dumps(["index", of_files, splits, of_fields, True])
    fingerprint = hashlib.blake2b(content.encode(), digest_size=16).hexdigest()
    if existing := _existing(folder, fingerprint, overwrite=args.overwrite):
        if not args.quiet:
            print(f"{folder} already holds this index: {existing.digest}")
        return
    if not os.access(folder, os.W_OK, effective_ids=True):
        raise StorageError(
            f"cannot write index.json into {folder}: permission denied; it has to lie in the "
            "files' folder, or above (--out)"
        )
    shards = [
        Shard(path, split, count, source.size, "")
        for path, split, count, source in zip(paths, splits, counts, sources, strict=True)
    ]
    task = partial(survey, folder, schema, shards, sources)
    nbytes = sum(source.size for source in sources)
    with ProgressBar(samples=None, nbytes=nbytes, quiet=args.quiet) as progress:
        looked = processes.results(task, len(paths), workers, progress.advance)
    index = Index(
        fields=schema,
        shards=tuple(
            shard for name in dict.fromkeys(splits) for shard, _ in looked if shard.split == name
        ),
        statistics=statistics_of({shard.split: moments} for shard, moments in looked),
        provenance={
            **made_by(args.command_line),
            "options": {"statistics": True},
            "source": {"name": "index", "files": len(paths), "bytes": nbytes},
            "fingerprint": fingerprint,
        },
    )
    with writable(folder):
        index.save(folder)  # atomically: readers see the old index or the new one
    if not args.quiet:
        print(f"{folder}: {summary(index)}")


def _parse_fields(
    fields: Sequence[str], axes: Sequence[str], unwritten: Sequence[str], files: Sequence[Path]
) -> dict[str, FieldSource]:
    """Parse the values of `--field`, `--axis` and `--unwritten`."""
    found: dict[str, FieldSource] = {}
    for name, place in pairs("--field", fields, "NAME=DATASET or NAME=VALUES:OFFSETS").items():
        dataset, colon, offsets = place.partition(":")
        if not dataset.strip("/") or (colon and not offsets.strip("/")):
            raise ConfigError(f"--field {name}={place}: it is NAME=DATASET or NAME=VALUES:OFFSETS")
        found[name] = FieldSource(dataset, offsets)
    if not found:
        first = next(_files(files[:1]))
        raise ConfigError(
            f"give --field NAME=DATASET for each field; {first} has {described(first)}"
        )
    try:
        check_fields(dict.fromkeys(found, Field("uint8")))
    except DataError as error:
        raise ConfigError(f"--field: {error}") from None
    for text in axes:
        name, _, axis = text.partition("=")
        if name not in found or not axis.removeprefix("-").isdecimal():
            raise ConfigError(
                f"--axis {text!r}: it is NAME=K, K a number, NAME one of {', '.join(found)}"
            )
        if found[name].offsets:
            raise ConfigError(
                f"--axis {text!r}: samples of different lengths lie end to end along axis 0"
            )
        found[name] = FieldSource(found[name].dataset, axis=int(axis))
    for name in unwritten:
        if name not in found:
            raise ConfigError(f"--unwritten {name}: it is one of {', '.join(found)}")
        found[name] = replace(found[name], unwritten=True)
    return found


def _files(given: Sequence[Path]) -> Iterator[Path]:
    """Yield the files, and the files in the folders."""
    return in_folders(given, lambda path: path.suffix.lower() in SUFFIXES, " or ".join(SUFFIXES))


def _located(given: Sequence[Path], out: Path | None) -> tuple[Path, list[str]]:
    """Return the folder of the index and the files' paths in it; the module has the rules."""
    links: dict[Path, Path] = {}
    for path in _files(given):
        real = path.resolve()
        if not os.path.exists(real):
            raise DataError(f"{path} does not exist, or is a link that leads nowhere")
        if out is None and real.parent != path.parent.resolve():
            raise DataError(
                f"{path} is a link to {real}: an index lists the file itself; --out FOLDER says "
                "where it shall lie, in a folder above all files"
            )
        if real in links:
            raise DataError(
                f"{path} and {links[real]} are the same file, {real}; give each file once"
            )
        links[real] = path
    folder = out.resolve() if out else Path(os.path.commonpath([real.parent for real in links]))
    if not folder.is_dir():
        raise DataError(f"--out {out} is not a folder")
    for real, path in links.items():
        if not real.is_relative_to(folder):
            raise DataError(
                f"{path}, which is {real}, lies outside of {folder}: an index lists files inside "
                "its folder, so that whoever copies or stages the folder has them; --out takes one "
                "above them"
            )
    return folder, [real.relative_to(folder).as_posix() for real in links]


def _splits(text: str, paths: Sequence[str]) -> list[str]:
    """Return the split of each file."""
    if "=" not in text:
        if problem := name_problem(text, "split"):
            raise ConfigError(f"--split: {problem}")
        return [text] * len(paths)
    split = parse_split(f"file:{text.removeprefix('file:')}")
    assert isinstance(split, ByFile)
    return split.of_files(paths)


def _schema(
    folder: Path, paths: Sequence[str], fields: Mapping[str, FieldSource]
) -> tuple[dict[str, Field], list[int]]:
    """Return the schema, which is the same in all files, and the number of samples in each file."""
    schema, count = look(folder / paths[0], fields)
    counts = [count]
    for path in paths[1:]:
        found, count = look(folder / path, fields)
        for name, field in schema.items():
            if (field, field.axis) != (found[name], found[name].axis):
                raise DataError(
                    f"{folder / path}: field {name!r} is {found[name]}, in {paths[0]} {field}"
                )
        counts.append(count)
    return schema, counts


def _existing(folder: Path, fingerprint: str, *, overwrite: bool) -> Index | None:
    """Return the index in the folder if it is the one to write, or None."""
    if (folder / PARTIAL).exists():
        raise DataError(f"{folder} holds an unfinished conversion ({PARTIAL}): finish it first")
    if not (folder / index_file.FILE).exists():
        return None
    try:
        index = Index.load(folder)
        if index.provenance.get("fingerprint") == fingerprint:
            return index
        problem = f"{folder} has another index, {index.digest}"
    except DataError as error:
        problem = str(error)
    if not overwrite:
        raise DataError(f"{problem}; --overwrite replaces it")
    return None
