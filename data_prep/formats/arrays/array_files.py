"""Find and open arrays in files, whatever their format; see `array_base`."""

import glob
import os
import re
import stat
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

import h5py

from data_prep.formats.arrays import array_hdf5, array_netcdf, array_numpy, array_zarr
from data_prep.formats.arrays.array_base import (
    FORMS,
    READING,
    ArrayFile,
    Where,
    Whole,
    unreadable,
)
from data_prep.formats.hdf5 import groups
from data_prep.formats.hdf5.groups import has_wildcard
from hpctrain.errors import ConfigError, DataError


def parse_where(text: str) -> list[Where]:
    """Parse FILE or FILE:KEY. FILE may be a pattern; its files are returned in natural order.

    Raises:
        ConfigError: No file matches the pattern.
    """
    cuts = [len(text), *(i for i in reversed(range(len(text))) if text[i] == ":")]
    for cut in cuts:  # the longest path that exists: file names may contain colons
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
    """Return a sort key that puts t2 before t10."""
    parts = re.findall(r"([0-9]+)|([^0-9]+)", text)
    return *((int(number or -1), other) for number, other in parts), text


def open_array(where: Where, axis: int | None = 0, *, external: bool = False) -> ArrayFile:
    """Open an array.

    Args:
        where: The address of the array.
        axis: The axis that counts the samples; None: the array is one sample.
        external: Whether links of an HDF5 file may lead to other files.

    Raises:
        DataError: The array is missing, damaged, or does not hold numbers.
        ConfigError: `where` does not say which array, or the array does not have this axis.
    """
    _check_file(where)
    array = _opened(where, axis or 0, external)
    if axis is None:
        return Whole(array)
    if array.single:
        array.close()
        raise DataError(
            f"{where} is a single value; an axis has to be the sample, or --axis NAME=none takes "
            "each array as one"
        )
    return array


def _opened(where: Where, axis: int, external: bool) -> ArrayFile:
    try:
        match where.kind:
            case "npy" | "npz" | "raw":
                return array_numpy.open_numpy(where, axis)
            case "hdf5":
                return array_hdf5.open_hdf5(where, axis, external)
            case "netcdf":
                return array_netcdf.NetCDFArray(where, axis, external)
            case _:
                return array_zarr.ZarrArray(where, axis)
    except READING as error:
        raise unreadable(where, error) from None


def expanded(where: Where, *, external: bool = False) -> tuple[list[Where], list[str]]:
    """Return the arrays that a pattern in a key matches, and the groups that lack the array.

    Without a pattern this is the array itself.

    Raises:
        ConfigError: Nothing matches.
        DataError: The file cannot be read.
    """
    if where.kind in ("raw", "npy") or not has_wildcard(where.key):
        return [where], []
    _check_file(where)
    try:
        if where.kind == "hdf5":
            found, gone = array_hdf5.matching(where, external)
        else:
            found, gone = groups.among(where.key, _names(where))
    except READING as error:
        raise unreadable(where, error) from None
    if not found:
        raise ConfigError(f"nothing in {where.path} matches {where.key!r}")
    wheres = [Where(where.path, key, matched) for key, matched in found]
    return sorted(wheres, key=lambda each: [*map(natural, each.matched)]), gone


def among_others(where: Where, rows: int) -> tuple[bool, str]:
    """Return whether an array must be one of many samples, and what to say; see `one_of_many`."""
    if not where.key or where.kind == "raw":
        return False, ""
    return groups.one_of_many(where.path, _names(where), where.key, rows)


def _names(where: Where) -> Collection[str]:
    match where.kind:
        case "hdf5":
            with h5py.File(where.path, "r", locking=False) as file:
                return array_hdf5.names_of(file)
        case "npz":
            return array_numpy.npz_names(where.path)
        case "netcdf":
            return array_netcdf.names_in(where.path)
        case _:
            return array_zarr.names_in(where.path)


def _check_file(where: Where) -> None:
    """Check that the file exists and is not a folder, pipe or device."""
    try:
        mode = os.stat(where.path).st_mode
    except (OSError, ValueError) as error:
        raise unreadable(where, error) from None
    if not stat.S_ISREG(mode) and not (stat.S_ISDIR(mode) and where.kind == "zarr"):
        what = "a folder" if stat.S_ISDIR(mode) else "not a file"
        raise DataError(f"{where.path} is {what}; a field is {FORMS}")


def named_by_files(files: Iterable[Path]) -> Iterator[tuple[str, Where]]:
    """Yield the fields of files given without `--field`: an .npy by its stem, an .npz by its keys.

    Raises:
        DataError: An .npz cannot be read.
        ConfigError: A file has another format. The message lists the arrays in it.
    """
    for path in map(str, files):
        where = Where(path)
        if where.kind == "npy":
            yield Path(path).stem, where
        elif where.kind == "npz":
            for key in array_numpy.npz_names(path):
                yield key, Where(path, key)
        else:
            open_array(where).close()  # raises an error that lists the arrays
            raise ConfigError(f"{path}: say which field it is: --field NAME={path}")
