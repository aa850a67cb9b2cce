"""Find and open arrays in files, whatever their format; see `array_base`."""

import glob
import os
import re
import stat
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from data_prep.formats import array_containers, array_numpy
from data_prep.formats.array_base import FORMS, ArrayFile, Where, unreadable
from hpctrain.errors import ConfigError, DataError


def parse_where(text: str) -> list[Where]:
    """Read FILE or FILE:KEY; FILE may be a pattern, whose files come in natural order.

    Raises:
        ConfigError: A pattern without files.
    """
    cuts = [len(text), *(i for i in reversed(range(len(text))) if text[i] == ":")]
    for cut in cuts:  # the longest that is there: names may have colons
        if cut and os.path.exists(text[:cut]):
            return [Where(text[:cut], text[cut + 1 :])]
    for cut in cuts:
        if found := glob.glob(text[:cut], recursive=True) if glob.has_magic(text[:cut]) else []:
            return [Where(path, text[cut + 1 :]) for path in sorted(found, key=natural)]
    path, _, key = text.partition(":")
    if glob.has_magic(path):
        raise ConfigError(f"no file matches {path!r}")
    return [Where(path, key)]


def natural(text: str) -> tuple[Any, ...]:
    """A key that sorts t2 before t10."""
    parts = re.findall(r"([0-9]+)|([^0-9]+)", text)
    return *((int(number or -1), other) for number, other in parts), text


def open_array(where: Where, axis: int = 0, *, external: bool = False) -> ArrayFile:
    """Open an array.

    Args:
        where: It.
        axis: That is the sample.
        external: Links of an HDF5 file may lead to other files.

    Raises:
        DataError: It is missing, damaged, or not an array of numbers.
        ConfigError: `where` does not say which array, or the axis is not there.
    """
    _check_file(where)
    try:
        match where.kind:
            case "npy" | "npz" | "raw":
                return array_numpy.open_numpy(where, axis)
            case kind:
                return array_containers.open_container(kind, where, axis, external)
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise unreadable(where, error) from None


def _check_file(where: Where) -> None:
    """See that it is there, and no folder, pipe or device.

    Raises:
        DataError: It is not.
    """
    try:
        mode = os.stat(where.path).st_mode
    except (OSError, ValueError) as error:
        raise unreadable(where, error) from None
    if not stat.S_ISREG(mode) and not (stat.S_ISDIR(mode) and where.kind == "zarr"):
        what = "a folder" if stat.S_ISDIR(mode) else "not a file"
        raise DataError(f"{where.path} is {what}; a field is {FORMS}")


def named_by_files(files: Iterable[Path]) -> Iterator[tuple[str, Where]]:
    """The fields of files without `--field`: each .npy by its stem, each .npz by its keys.

    Raises:
        DataError: An .npz cannot be read.
        ConfigError: Another format, with the arrays that are in it.
    """
    for path in map(str, files):
        where = Where(path)
        if where.kind == "npy":
            yield Path(path).stem, where
        elif where.kind == "npz":
            for key in array_numpy.npz_names(path):
                yield key, Where(path, key)
        else:
            open_array(where).close()  # says what is in it
            raise ConfigError(f"{path}: say which field it is: --field NAME={path}")
