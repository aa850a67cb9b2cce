"""Find and open arrays in files, whatever their format, and the arrays that each field has."""

import glob
import os
import re
import stat
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from data_prep.formats.arrays import array_hdf5, array_numpy
from data_prep.formats.arrays.array_base import FORMS, ArrayFile, OpenedArray, Where, reading
from data_prep.formats.hdf5.groups import SHOWN, has_wildcard
from data_prep.formats.opening import OTHERS
from hpctrain.base.errors import ConfigError, DataError
from hpctrain.base.terminal.terminal import few
from hpctrain.data.shards.field import name_problem


def parse_where(text: str) -> list[Where]:
    """Parse FILE or FILE:KEY. FILE may be a pattern; its files are returned in natural order."""
    cuts = [len(text), *(i for i in reversed(range(len(text))) if text[i] == ":")]
    for cut in cuts:  # the longest path that exists: file names may contain colons
        path = text[:cut]
        found = [path] if os.path.exists(path) else glob.glob(path, recursive=True)
        if found:
            return [Where(path, text[cut + 1 :]) for path in sorted(found, key=natural)]
    path, _, key = text.partition(":")
    if glob.has_magic(path):
        raise ConfigError(f"no file matches {path!r}")
    return [Where(path, key)]


def natural(text: str) -> tuple[Any, ...]:
    """Return a sort key that puts t2 before t10."""
    parts = re.findall(r"([0-9]+)|([^0-9]+)", text)
    return *((int(number or -1), other) for number, other in parts), text


_FORMATS: dict[str, Callable[[Where, ExitStack], OpenedArray]] = {
    "npy": array_numpy.open_npy,
    "npz": array_numpy.open_npz,
    "hdf5": array_hdf5.open_hdf5,
}


def open_array(where: Where, axis: int | None = 0) -> ArrayFile:
    """Open an array; without an axis, the whole array is one sample."""
    _check_file(where)
    with ExitStack() as opened:
        with reading(where):
            array = ArrayFile(where, _FORMATS[where.kind](where, opened), axis)
        if array.single and axis is not None:
            raise DataError(
                f"{where} is a single value; an axis has to be the sample, or --axis NAME=none "
                "takes each array as one"
            )
        return array.opened_by(opened)


def expanded(where: Where) -> tuple[list[Where], list[str]]:
    """Return the arrays that a pattern in a key matches, and the groups that lack the array.

    Without a pattern this is the array itself.
    """
    if where.kind != "hdf5" or not has_wildcard(where.key):
        return [where], []
    _check_file(where)
    with reading(where):
        found, gone = array_hdf5.matching(where)
    if not found:
        raise ConfigError(f"nothing in {where.path} matches {where.key!r}")
    wheres = [Where(where.path, key, matched) for key, matched in found]
    return sorted(wheres, key=lambda each: [*map(natural, each.matched)]), gone


def _check_file(where: Where) -> None:
    """Check that the file exists and is not a folder, pipe or device."""
    if where.kind not in _FORMATS:
        raise ConfigError(
            f"{where}: its name does not say what it is; {FORMS}. For NetCDF, Zarr, raw numbers "
            f"(numpy.memmap) and others, {OTHERS}"
        )
    with reading(where):
        mode = os.stat(where.path).st_mode
    if not stat.S_ISREG(mode):
        what = "a folder" if stat.S_ISDIR(mode) else "not a file"
        raise DataError(f"{where.path} is {what}; a field is {FORMS}")


def _named_by_files(files: Iterable[Path]) -> Iterator[tuple[str, Where]]:
    """Yield the fields of files without `--field`: an .npy by its stem, an .npz by its keys."""
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


def addresses(
    files: Sequence[Path], named: Sequence[str]
) -> tuple[dict[str, list[Where]], list[str]]:
    """Return the addresses of the arrays of each field, and notes on what patterns leave out."""
    wheres: dict[str, list[Where]] = {}

    def check_free(name: str, other: object) -> None:
        if name in unnamed:
            raise ConfigError(
                f"{wheres[name][0]} and {other} would both be the field {name!r}; give both with "
                "--field to put one behind the other, or another NAME"
            )

    unnamed, notes = set[str](), list[str]()
    for name, where in _named_by_files(files):
        check_free(name, where)
        unnamed.add(name)
        wheres[name] = [where]
    for text in named:
        name, equals, file = text.partition("=")
        if not (name and equals and file):
            raise ConfigError(f"--field {text!r} is not NAME=FILE; {FORMS}")
        check_free(name, file)
        for where in parse_where(file):
            several, gone = expanded(where)
            wheres.setdefault(name, []).extend(several)
            if gone:
                notes.append(f"{where} has nothing at {few(gone, SHOWN)}: left out")
    for name, found in wheres.items():
        if problem := name_problem(name, "field"):
            raise ConfigError(f"{problem}; --field NAME={found[0]} gives another")
        where, times = Counter(found).most_common(1)[0]
        if times > 1:
            raise ConfigError(f"{where} is there twice in the field {name!r}")
    if not wheres:
        raise ConfigError(f"give .npy or .npz files before OUT, or --field NAME=FILE; {FORMS}")
    _check_groups({name: found for name, found in wheres.items() if found[0].matched})
    return wheres, notes


def _check_groups(wheres: Mapping[str, Sequence[Where]]) -> None:
    """Check that the patterns of all fields match the same groups, in the same order."""
    groups: dict[str, dict[Any, Where]] = {}
    for name, found in wheres.items():
        paths = dict.fromkeys(where.path for where in found)
        files = {path: number for number, path in enumerate(paths)}
        groups[name] = {(files[where.path], where.matched): where for where in found}
    first = next(iter(groups), "")
    for name in groups:
        for one, other in ((first, name), (name, first)):
            alone = groups[one].keys() - groups[other]
            if lonely := sorted((str(groups[one][key]) for key in alone), key=natural):
                raise ConfigError(
                    f"the fields {first!r} and {name!r} match different groups: {other!r} has "
                    f"nothing beside {few(lonely, SHOWN)}; a narrower pattern "
                    "leaves them out"
                )
