"""The addresses of the arrays of each field, from the files and the --field options of `arrays`."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from data_prep.formats.arrays.array_base import FORMS, Where
from data_prep.formats.arrays.array_files import expanded, named_by_files, natural, parse_where
from data_prep.formats.hdf5.groups import shortened
from hpctrain.errors import ConfigError, DataError
from hpctrain.shards.field import check_name


def addresses(
    files: Sequence[Path], named: Sequence[str], *, external: bool
) -> tuple[dict[str, list[Where]], list[str]]:
    """Return the addresses of the arrays of each field, and notes on what patterns leave out.

    Args:
        files: .npy files, whose stems name the fields, and .npz files, whose keys do.
        named: "NAME=FILE" or "NAME=FILE:KEY".
        external: Whether HDF5 files may lead to other files.

    Raises:
        ConfigError: There is no file, a file occurs twice, or a file holds several arrays and the
            key is missing.
        DataError: A file is missing or cannot be read.
    """
    wheres: dict[str, list[Where]] = {}
    for name, where in named_by_files(files):
        if name in wheres:
            raise ConfigError(
                f"{wheres[name][0]} and {where} would both be the field {name!r}; --field "
                f"{name}={wheres[name][0]} --field {name}={where} puts one behind the other"
            )
        _check_name(name, where)
        wheres[name] = [where]
    unnamed, notes = set(wheres), list[str]()
    for text in named:
        name, equals, file = text.partition("=")
        if not (name and equals and file):
            raise ConfigError(f"--field {text!r} is not NAME=FILE; {FORMS}")
        if name in unnamed:
            raise ConfigError(
                f"{wheres[name][0]} and {file} would both be the field {name!r}; give both with "
                "--field to put one behind the other, or another NAME"
            )
        found = parse_where(file)
        _check_name(name, found[0])
        for where in found:
            several, gone = expanded(where, external=external)
            wheres.setdefault(name, []).extend(several)
            if gone:
                notes.append(f"{where} has nothing at {shortened(gone)}: left out")
    for name, found in wheres.items():
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
            if lonely := [str(groups[one][key]) for key in groups[one].keys() - groups[other]]:
                raise ConfigError(
                    f"the fields {first!r} and {name!r} match different groups: {other!r} has "
                    f"nothing beside {shortened(sorted(lonely, key=natural))}; a narrower pattern "
                    "leaves them out"
                )


def _check_name(name: str, where: Where) -> None:
    try:
        check_name(name, "field")
    except DataError as error:
        raise ConfigError(f"{error}; --field NAME={where} gives another") from None
