"""What a conversion adds to a source: other names of its fields, and a limit of what it gives."""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast

from data_prep.options import Options
from data_prep.processes import Progress
from data_prep.show.console import size
from data_prep.source import BadRecords, Block, Source
from hpctrain.errors import ConfigError, DataError
from hpctrain.shards.sample_schema import check_fields

_ADDED = ("_length", "_offsets")  # the loader adds FIELD_length or FIELD_offsets to its batches
# Deflate, in gzip and PNG, cannot do more than 1,032 to 1; but a Parquet file of 226 KB can hold
# 5 GB, because the same value is stored once.
GROWTH = 1000
FLOOR = 2**30  # bytes; less does no harm
_CURE = (
    "is the source a file that unpacks to nearly anything? If they are right, --max-output SIZE "
    "allows more, and the same command goes on"
)


def limited(advance: Progress, source: Source, options: Options) -> Progress:
    """Return a function that counts samples and bytes, and stops a conversion above the limit."""
    files = {file.path: file.size for piece in source.pieces for file in piece.files}
    most, why, done = options.max_output, "", 0
    if most is None and source.unpacks and files:
        most, why = _most(sum(files.values()))

    def counted(samples: int, nbytes: int) -> None:
        nonlocal done
        advance(samples, nbytes)
        done += nbytes
        if most is not None and done > most:
            raise DataError(f"the samples are more than {size(most)}{why}: {_CURE}")

    return counted


def check_unpacked(what: str, nbytes: int, read: int, max_output: int | None) -> None:
    """Check the size that a packed array says it has, before all of it is read."""
    most, why = _most(read)
    if nbytes > (max_output or most):
        why = "" if max_output else why
        raise DataError(f"{what} has more than {size(max_output or most)}{why}: {_CURE}")


def _most(read: int) -> tuple[int, str]:
    """Return the most bytes of samples from so many bytes of files, and the reason."""
    if GROWTH * read <= FLOOR:
        return FLOOR, f", the limit for a source of {size(read)}"
    return GROWTH * read, f", {GROWTH} times the source of {size(read)}"


@dataclass(frozen=True)
class _Renamed(Source):
    """A source whose fields have other names."""

    source: Any = None
    names: Mapping[str, str] = field(default_factory=dict)

    @property
    def unpacks(self) -> bool:  # type: ignore[override]
        """See `Source`."""
        return bool(self.source.unpacks)

    def split_files(self) -> Iterable[str]:
        """See `Source`."""
        return cast(Iterable[str], self.source.split_files())

    def read(self, what: Any, reading: BadRecords) -> Iterator[Block]:
        """See `Source`."""
        for block in self.source.read(what, reading):
            yield replace(block, values=_with(self.names, block.values))


def renamed(source: Source, names: Mapping[str, str]) -> Source:
    """Return a source with other names of fields."""
    new: dict[str, str] = {}
    for name in source.fields:
        other = new.setdefault(names.get(name, name), name)
        if other != name:
            raise ConfigError(f"{other!r} and {name!r} would both be {names.get(name, name)!r}")
    for name in names:
        if name not in source.fields:
            have = ", ".join(source.fields)
            raise ConfigError(f"--rename {name}: there is no such field; there are {have}")
    fields = _with(names, source.fields)
    for name, spec in fields.items():
        problem, at = "", name
        try:
            check_fields({name: spec})
        except DataError as error:
            problem = str(error)
        if added := [name + more for more in _ADDED if spec.variable and name + more in fields]:
            at = added[0]
            problem = problem or f"the loader adds {at!r} for the lengths of {name!r}"
        if problem:
            raise ConfigError(f"{problem}; --rename {new[at]!r}=NAME gives another name")
    if not names:
        return source
    same = {each.name: getattr(source, each.name) for each in dataclasses.fields(Source)}
    more = {
        "group": names.get(source.group, source.group),
        "fields": fields,
        "categories": _with(names, source.categories),
        "about": {**source.about, "renamed": dict(names)},
    }
    return _Renamed(**same | more, source=source, names=names)


def _with(names: Mapping[str, str], values: Mapping[str, Any]) -> dict[str, Any]:
    return {names.get(name, name): value for name, value in values.items()}
