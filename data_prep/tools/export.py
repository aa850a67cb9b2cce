"""Export samples to common file formats: images, or Parquet.

parquet  SPLIT.parquet has a column for each field. An array is a fixed_shape_tensor of Arrow, or a
         fixed-size list if it has one axis. A sequence is a list, or a string with --text NAME
images   SPLIT/CLASS/0000012.png, named by the number of the sample. Encoded images are written as
         they are. CLASS is the name of the category; classes.txt lists the names by label

Values never change: after an export and a new conversion (by `table` or `images`) the samples are
the same. For NumPy no export is needed: `h5py.File(SHARD)[FIELD][:]` is the array.
"""

import argparse
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from data_prep.datasets.dataset import DataSet, add_arguments
from data_prep.exports.images import Images
from data_prep.exports.parquet import Parquet
from data_prep.options import add_options
from data_prep.show import console
from hpctrain.disk import TEMPORARY, temporary
from hpctrain.errors import ConfigError, DataError
from hpctrain.progress_bar import Progress
from hpctrain.shards.commit import storage_error

_KINDS = ("images", "parquet")


_OPTIONS = """
--limit N : positive
    export only the first N samples of each split
--label NAME
    with --to images: the field of classes
--text NAME ...
    with --to parquet: write this field of UTF-8 bytes as strings
--quiet
    print errors only
"""


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command to its parser."""
    add_arguments(parser, "export")
    what = "folder to write; it must be empty or new"
    parser.add_argument("out", type=Path, metavar="OUT", help=what)
    parser.add_argument("--to", choices=_KINDS, required=True, help="format of the files")
    add_options(parser, _OPTIONS)


def run(args: argparse.Namespace) -> None:
    """Run the command."""
    data, out = DataSet(args.folder), args.out
    if args.label is not None and args.to != "images":
        raise ConfigError("--label is an option of --to images")
    if args.text and args.to != "parquet":
        raise ConfigError("--text is an option of --to parquet")
    if out.resolve().is_relative_to(data.folder.resolve()):
        raise ConfigError(f"{out} lies in the data set's own folder; give another OUT")
    splits = data.splits(args.split)
    counts = {split.name: min(args.limit or split.count, split.count) for split in splits}
    nbytes = sum(shard.bytes for split in splits for shard in split.shards)
    with _whole(out) as folder:
        export = (
            Images(data, args.field, args.label)
            if args.to == "images"
            else Parquet(data, data.fields(args.field), args.text)
        )
        with Progress(sum(counts.values()), nbytes, quiet=args.quiet) as progress:
            for split in splits:
                export.write(folder, split, counts[split.name], progress.advance)
    if not args.quiet:
        splits_text = ", ".join(f"{name} {count:,}" for name, count in counts.items())
        left_out = ", ".join(name for name in data.index.fields if name not in export.fields)
        more = f"; without {left_out}" if left_out else ""
        console.say(f"{out}: {sum(counts.values()):,} samples ({splits_text}) as {args.to}{more}")


@contextmanager
def _whole(out: Path) -> Iterator[Path]:
    """Yield a temporary folder that is renamed to `out` at the end, or removed after an error."""
    try:
        if out.exists() and next(out.iterdir(), None) is not None:
            raise DataError(f"{out} is not empty; give an empty or new folder")
        folder = temporary(out.resolve())
        folder.parent.mkdir(parents=True, exist_ok=True)
        _clear(folder)
        folder.mkdir()
    except (NotADirectoryError, FileExistsError):
        raise DataError(f"{out} is a file, or lies in one; OUT is a folder") from None
    except OSError as error:
        raise storage_error(out, error) from None
    try:
        yield folder
        os.replace(folder, out.resolve())
    except OSError as error:
        raise storage_error(out, error) from None
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _clear(folder: Path) -> None:
    """Remove the temporary folders of killed exports to the same place on this machine."""
    prefix = folder.name.rpartition(".")[0]
    for path in folder.parent.iterdir():
        found = TEMPORARY.match(path.name)
        same = found is not None and path.name.rpartition(".")[0] == prefix
        if found and same and not Path("/proc", found["pid"]).exists():
            shutil.rmtree(path, ignore_errors=True)
