"""Sources whose samples come one by one. The first sample that can be used decides the schema."""

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, ClassVar, NamedTuple, Self

import xxhash

from data_prep.formats.images.pixels import Pixels
from data_prep.formats.samples import SampleCollector, Unusable, fields_of, fit_all, is_name
from data_prep.options import Options
from data_prep.source import BadRecords, InputSource, SampleBlock
from data_prep.writing.split import ByColumn
from hpctrain.base.errors import DataError
from hpctrain.data.shards.types import Array

_COMPARED = 8  # samples at the begin that must be the same when they are asked for again


class Encoded(NamedTuple):
    """A sample that is not decoded yet."""

    file: str  # the file that it comes from
    record: str  # its name for messages
    # Returns its values by field, and the value of its column or "", or raises `Unusable`.
    decode: Callable[[], tuple[Mapping[str, Any], str]]
    key: bytes = b""  # the key that decides its split, if the source is `keyed`


@dataclass(frozen=True)
class Stream(InputSource):
    """A source of samples that are decoded one by one."""

    keyed: ClassVar[bool] = False  # whether samples have keys, or their content decides the split
    pixels: Pixels = field(default_factory=Pixels)  # how images become samples
    images: frozenset[str] = frozenset()  # the fields that are images
    with_column: bool = False  # whether samples come with the value of a column
    by_field: bool = False  # whether a field names the splits, whatever that column says
    by_file: bool = False  # whether the split is by file, so that a block has samples of one file
    # The piece that has the first sample, and digests of that one and some that follow it.
    begin: tuple[Any, Sequence[str]] = None, ()

    @abstractmethod
    def encoded(self, what: Any, reading: BadRecords) -> Iterator[Encoded]:
        """Yield the samples of a piece, by its `what`."""

    def read(self, what: Any, reading: BadRecords) -> Iterator[SampleBlock]:
        """See `InputSource`."""
        begin = list(self.begin[1]) if what == self.begin[0] else []
        columned = self.with_column and not self.by_field
        samples = SampleCollector(self.fields, keyed=self.keyed, columned=columned)
        for file, record, decode, key in self.encoded(what, reading):
            try:
                values, split = decode()
                if bool(split) != self.with_column:
                    raise Unusable("some samples have a 'split', some have none")
                sample = fit_all(values, self.fields)
                if begin and begin.pop(0) != _digest(sample):
                    raise DataError(
                        f"{file}: {record}: it is another one when it is asked again. Leave random "
                        "augmentation out, because only one draw of it would be stored; it belongs "
                        "into the training (data.transforms)"
                    )
            except Unusable as error:
                reading.bad(file, record, str(error))
                continue
            if len(samples) and self.by_file and samples.file != file:
                yield samples.take()
            samples.add(sample, file, record, key, split)
            if samples.full:
                yield samples.take()
        if len(samples):
            yield samples.take()

    def with_fields(self, options: Options, variable: Sequence[str], none: str) -> Self:
        """Return the source with the schema of its first sample that can be used.

        The first axis of the `variable` fields varies in length. `none` begins the message if there
        is no such sample.
        """
        problems = BadRecords(options.on_error)
        for piece in self.pieces:
            found = iter(self.encoded(piece.what, problems))
            for file, record, decode, _ in found:
                try:
                    values, split = decode()
                    fields = fields_of(values, variable)
                    fields |= {name: self.pixels.field_of(values[name]) for name in self.images}
                    first = fit_all(values, fields)
                except Unusable as error:
                    problems.bad(file, record, str(error))
                    continue
                begin = [_digest(first)]
                for _, _, following, _ in islice(found, _COMPARED - 1):
                    with suppress(Unusable):
                        values, name = following()
                        if bool(name) == bool(split):  # `read` leaves out the others
                            begin.append(_digest(fit_all(values, fields)))
                own, by = self.own if split else "", options.split
                names = [name for name, field in fields.items() if is_name(field)]
                return replace(
                    self,
                    fields=fields,
                    own=own,
                    columns=[*filter(None, [own]), *names],
                    with_column=bool(split),
                    by_field=isinstance(by, ByColumn) and by.column in fields,
                    begin=(piece.what, begin),
                )
        raise DataError(f"{none}{problems.why()}")


def _digest(sample: Mapping[str, Array]) -> str:
    digest = xxhash.xxh3_128()
    for value in sample.values():
        digest.update(f"{value.shape}".encode() + value.tobytes())
    return digest.hexdigest()
