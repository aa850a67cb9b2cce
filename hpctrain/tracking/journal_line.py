"""One line of the journal: the records that there are, and how they are read.

    {"kind":"status","attempt":1,"time":1.7e9,"status":"RUNNING","host":"n01","pid":71,"started":5}
    {"kind":"params","attempt":1,"time":1.7e9,"params":{"optimizer.lr":"0.1"}}
    {"kind":"metrics","attempt":1,"time":1.7e9,"step":1,"metrics":{"loss":2.3,"grad_norm":"nan"}}
    {"kind":"time","attempt":1,"time":1.7e9,"step":1,"seconds":{"compute":9.1,...},"device_s":12.2}
    {"kind":"note","attempt":1,"time":1.7e9,"topic":"slow_rank","text":"rank 3 ...","step":40}
    {"kind":"superseded","attempt":2,"time":1.7e9,"from":214,"to":307}
    {"kind":"artifact","attempt":2,"time":1.7e9,"file":"artifacts/images/a.png","to":"images"}

A line is checked against the types of its kind, and read as it stands: one of a newer version may
have more keys, or be of another kind.
"""

import math
from collections.abc import Sequence
from functools import reduce
from operator import or_
from typing import Any, Literal

import msgspec

from hpctrain.base.errors import DamageError
from hpctrain.base.files import record as door
from hpctrain.base.files.record import Count, Seconds, Time


class _Event(door.Record, frozen=True):
    """What every record has, also one of a kind that only a newer version knows."""

    attempt: Count
    time: Time


class _Kind(_Event, frozen=True):
    kind: str


class _Known(_Event, frozen=True, tag_field="kind", tag=lambda name: name[1:].lower()):
    """A record of a kind that this version knows; the kind is the name of the class."""


class _Metrics(_Known, frozen=True):
    step: Count
    metrics: dict[str, door.Number]


class _Time(_Known, frozen=True):
    step: Count
    seconds: dict[str, Seconds]
    device_s: Seconds = 0.0


class _Params(_Known, frozen=True):
    params: dict[str, str]


class _Tags(_Known, frozen=True):
    tags: dict[str, str]


class _Superseded(_Known, frozen=True, rename={"begin": "from", "end": "to"}):
    begin: Count
    end: Count


class _Artifact(_Known, frozen=True):
    file: str
    to: str


class _Field(door.Record, frozen=True):
    dtype: str
    shape: tuple[Count, ...]


class _Dataset(_Known, frozen=True):
    name: str
    digest: str
    source: str
    context: str
    samples: dict[str, Count]
    fields: dict[str, _Field]


class _Note(_Known, frozen=True):
    step: Count
    topic: str
    text: str


class _Model(_Known, frozen=True):
    pass


class _Status(_Known, frozen=True):
    status: Literal["RUNNING", "FINISHED", "FAILED", "KILLED", "SCHEDULED"]
    host: str = ""
    pid: Count = 0
    started: Count = 0
    reason: str = ""
    final: bool = True

    def __post_init__(self) -> None:
        if self.status == "RUNNING" and not (self.host and self.pid):
            raise ValueError("a start has a host and a pid")


class Outline(_Kind, frozen=True, gc=False, rename={"begin": "from"}):
    """What a record says without its params, tags and values, which take long to read."""

    step: Count = 0
    seconds: dict[str, Seconds] = msgspec.field(default_factory=dict)
    begin: Count = 0  # of what is superseded
    name: str = ""
    source: str = ""
    samples: dict[str, Count] = msgspec.field(default_factory=dict)


_Checked: Any = reduce(or_, _Known.__subclasses__())
_KINDS = {kind.__struct_config__.tag for kind in _Known.__subclasses__()}


def parse(line: bytes) -> dict[str, Any] | None:
    """Return the record in `line`; None if the line is incomplete or is no record."""
    where = "a record of the journal"
    try:
        body = door.decode(dict[str, Any], line, where)
        if door.convert(_Kind, body, where).kind in _KINDS:
            door.convert(_Checked, body, where)
        return body
    except DamageError as error:
        if error.at:  # a line that was cut off has none
            door.say(f"{error}: it is left out")
        return None


def parse_all(lines: list[bytes]) -> Sequence[dict[str, Any] | None]:
    """Do what `parse` does for each line. One call for all of them takes half of the time."""
    try:
        bodies = door.decode(tuple[dict[str, Any], ...], b"[" + b",".join(lines) + b"]", "")
        door.convert(tuple[_Checked, ...], bodies, "")
    except DamageError:
        bodies = ()
    if len(bodies) != len(lines):  # some line is invalid, or of a newer version
        return [parse(line) for line in lines]
    return bodies


def outline_all(lines: list[bytes]) -> Sequence[Outline | None]:
    """Return the outline of each line; None if the line is no record."""
    try:
        found = door.decode(tuple[Outline, ...], b"[" + b",".join(lines) + b"]", "")
    except DamageError:
        found = ()
    return found if len(found) == len(lines) else [*map(_outline, lines)]


def _outline(line: bytes) -> Outline | None:
    try:
        return door.decode(Outline, line, "")
    except DamageError:
        return None


def encode(value: float) -> float | str:
    """Return a float as JSON can hold it, which has no NaN: that is text, and `float` reads it."""
    value = float(value)
    return value if math.isfinite(value) else repr(value)
