"""What an unfinished conversion keeps as JSON: its plan, and the result of each piece.

Paths and names of categories may have any bytes, so half surrogates stay in texts.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec

from data_prep.source import BadRecord
from data_prep.writing.moments import Moments
from hpctrain.base.errors import DamageError, DataError
from hpctrain.base.files.record import Count, Record, decode, matching, read_bytes
from hpctrain.data.shards.field import Field
from hpctrain.data.shards.index import Shard

_LARGEST = 1 << 30  # bytes; a piece may have millions of records that cannot be used

R = TypeVar("R", bound=Record)


class ConversionPlan(Record, frozen=True):
    """A conversion, as far as `finalize` needs to know it."""

    fingerprint: str  # a digest of the source and of all options that the result depends on
    pieces: Count  # the number of pieces
    splits: Sequence[str]  # the names of the splits that are known beforehand, in their order
    fields: Mapping[str, Field]  # the schema
    categories: Mapping[str, Sequence[str]]  # see `Source`
    # The provenance for the index, without what is only known at the end.
    provenance: dict[str, Any]
    # What to do with records that cannot be used.
    on_error: Annotated[str, matching("stop|skip|collect", "stop or skip")]  # collect: of before
    parts: Count = 0  # the number of parts N of `--part I/N`; 0 without that option
    beside: Mapping[str, str] = msgspec.field(default_factory=dict)  # see `Source`
    group: str = ""  # the field of which no value is in two splits, or ""

    @property
    def command(self) -> str:
        """The command line without `--part`."""
        return str(self.provenance.get("command"))

    def share(self, part: int) -> range:
        """Return the numbers of the pieces of a part; parts count from 1."""
        parts = max(1, self.parts)
        return range(self.pieces * (part - 1) // parts, self.pieces * part // parts)


class Result(Record, frozen=True):
    """The result of converting a piece."""

    fingerprint: str  # the fingerprint of the job
    shards: Sequence[Shard]  # the shards; their paths are relative to the piece's folder
    moments: dict[str, dict[str, Moments]]  # by split and field
    problems: Sequence[BadRecord]  # the records that could not be used
    # The number of records that held nothing, by the reason.
    skipped: dict[str, Count] = msgspec.field(default_factory=dict)


def as_json(record: Record) -> str:
    """Return the text of the file of a record."""
    return json.dumps(msgspec.structs.asdict(record), default=asdict)


def load(kind: type[R], path: Path, parts: int) -> R:
    """Return the record in a file, of which the last `parts` of the path may be no links.

    Damage is a DataError. No file is a FileNotFoundError.
    """
    try:
        return decode(kind, read_bytes(path, parts, _LARGEST)[0], path, surrogates=True)
    except DamageError as error:
        raise DataError(str(error)) from None
    except DataError as error:  # of a field or shard
        raise DataError(f"{path}: {error}") from None
