"""Other names for the fields of a source."""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast

from data_prep.source import BadRecords, InputSource, SampleBlock
from data_prep.writing.sample_schema import check_fields
from hpctrain.errors import ConfigError, DataError

_ADDED = ("_length", "_offsets")  # the loader adds FIELD_length or FIELD_offsets to its batches


@dataclass(frozen=True)
class _Renamed(InputSource):
    """A source whose fields have other names."""

    source: Any = None
    names: Mapping[str, str] = field(default_factory=dict)

    def split_files(self) -> Iterable[str]:
        """See `InputSource`."""
        return cast(Iterable[str], self.source.split_files())

    def read(self, what: Any, reading: BadRecords) -> Iterator[SampleBlock]:
        """See `InputSource`."""
        for block in self.source.read(what, reading):
            yield replace(block, values=_with(self.names, block.values))


def renamed(source: InputSource, names: Mapping[str, str]) -> InputSource:
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
    same = {each.name: getattr(source, each.name) for each in dataclasses.fields(InputSource)}
    more = {
        "group": names.get(source.group, source.group),
        "fields": fields,
        "categories": _with(names, source.categories),
        "about": {**source.about, "renamed": dict(names)},
    }
    return _Renamed(**same | more, source=source, names=names)


def _with(names: Mapping[str, str], values: Mapping[str, Any]) -> dict[str, Any]:
    return {names.get(name, name): value for name, value in values.items()}
