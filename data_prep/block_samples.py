"""The samples of a block: which can be used, what they hold, which splits they go to."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from data_prep.source import Block, Reading, Source
from data_prep.split import ByColumn, ByFile, Split, hash_keys
from hpctrain.data.field import check_name
from hpctrain.data.ragged import Ragged, offsets_of
from hpctrain.data.sample_schema import check_batch
from hpctrain.data.types import Array, Int64s
from hpctrain.errors import DataError

Rows = Mapping[str, Array | Ragged]


@dataclass(frozen=True)
class Usable:
    """Samples of a block: `rows`, and which of the block's they are."""

    block: Block
    rows: Rows
    which: Int64s

    @classmethod
    def of(cls, block: Block, source: Source) -> "Usable":
        """All, as the schema has them.

        Raises:
            DataError: It does not fit the schema.
        """
        try:
            rows = {
                name: _native(value)
                for name, value in check_batch(block.values, source.fields).items()
            }
            count = len(next(iter(rows.values())))
            for what in ("keys", "column", "records"):
                given = getattr(block, what)
                if given is not None and len(given) != count:
                    raise DataError(f"a block of {count} samples has {len(given)} {what}")
        except DataError as error:
            raise DataError(f"{block.file or source.name}: {error}") from None
        return cls(block, rows, np.arange(count))

    def __len__(self) -> int:
        return len(self.which)

    def only(self, mask: NDArray[np.bool_]) -> "Usable":
        """Those where `mask`, (n,), is set."""
        if mask.all():
            return self
        return Usable(self.block, _only(self.rows, mask), self.which[mask])

    def contents(self) -> list[bytes]:
        """The bytes of each sample's fields; of a sequence also its length."""
        parts = [
            _ragged_bytes(value) if isinstance(value, Ragged) else _bytes(value)
            for value in self.rows.values()
        ]
        return parts[0] if len(parts) == 1 else list(map(b"".join, zip(*parts, strict=True)))

    def split_keys(self) -> Sequence[bytes]:
        """What decides the split."""
        keys = self.block.keys
        if keys is None:
            return self.contents()
        return keys if len(self) == len(keys) else [keys[i] for i in self.which.tolist()]

    def splits(self, split: Split) -> tuple[Sequence[str], NDArray[np.intp]]:
        """The names of splits, and for each sample its split's place among them, (n,)."""
        if isinstance(split, ByColumn):
            column = self.block.column
            assert column is not None  # the source has it: see `convert`
            known: dict[str, int] = {}
            numbers = [known.setdefault(str(column[i]), len(known)) for i in self.which.tolist()]
            return list(known), np.array(numbers, np.intp)
        if isinstance(split, ByFile):
            return [split.of_file(self.block.file)], np.zeros(len(self), np.intp)
        if len(split.fractions) == 1:
            return list(split.fractions), np.zeros(len(self), np.intp)
        return list(split.fractions), split.numbers(hash_keys(self.split_keys()))

    def finite(self, problems: Reading) -> "Usable":
        """Those without a value that is not finite."""
        good = np.ones(len(self), bool)
        for name, value in self.rows.items():
            array = value.values if isinstance(value, Ragged) else value
            if array.dtype.kind != "f" or np.isfinite(array).all():
                continue
            for i, sample in enumerate(value):
                bad = int((~np.isfinite(sample)).sum())
                if bad and good[i]:
                    good[i] = False
                    problems.bad(
                        *self._record(i), f"field {name!r} has {bad} NaN or infinite values"
                    )
        return self.only(good)

    def named(self, split: ByColumn, problems: Reading) -> "Usable":
        """Those whose column names a split."""
        names, numbers = self.splits(split)
        reasons: dict[int, str] = {}
        for place, name in enumerate(names):
            try:
                check_name(name, f"column {split.column!r}: split")
            except DataError as error:
                reasons[place] = str(error)
        if not reasons:
            return self
        good = ~np.isin(numbers, list(reasons))
        for i in np.flatnonzero(~good).tolist():
            problems.bad(*self._record(i), reasons[int(numbers[i])])
        return self.only(good)

    def _record(self, i: int) -> tuple[str, str]:
        """What to call a sample: its file and record."""
        place = int(self.which[i])
        records = self.block.records
        return self.block.file, records[place] if records is not None else f"sample {place}"


def _native(value: Array | Ragged) -> Array | Ragged:
    """In native byte order: equal samples have equal bytes."""
    array = value.values if isinstance(value, Ragged) else value
    if array.dtype.isnative:
        return value
    array = array.astype(array.dtype.newbyteorder("="))
    return Ragged(array, value.offsets) if isinstance(value, Ragged) else array


def _bytes(array: Array) -> list[bytes]:
    """Of each row; made at once, as a million of them would take long one by one."""
    rows = np.ascontiguousarray(array).reshape(len(array), -1)
    width = rows.itemsize * rows.shape[1]
    if width >= 2**31:
        return [row.tobytes() for row in rows]
    bytes_: list[bytes] = rows.view(f"V{width}").reshape(-1).tolist()
    return bytes_


def _ragged_bytes(value: Ragged) -> list[bytes]:
    return [len(sample).to_bytes(8, "little") + sample.tobytes() for sample in value]


def _only(rows: Rows, mask: NDArray[np.bool_]) -> Rows:
    chosen: dict[str, Array | Ragged] = {}
    for name, value in rows.items():
        if isinstance(value, Ragged):
            lengths = value.lengths
            chosen[name] = Ragged(value.values[np.repeat(mask, lengths)], offsets_of(lengths[mask]))
        else:
            chosen[name] = value[mask]
    return chosen


def by_split(
    rows: Rows, names: Sequence[str], numbers: NDArray[np.intp]
) -> Iterator[tuple[str, Rows]]:
    """The samples of each split that has some, in the order of the names."""
    counts = np.bincount(numbers, minlength=len(names)).tolist()
    for place, name in enumerate(names):
        if counts[place]:
            yield name, rows if counts[place] == len(numbers) else _only(rows, numbers == place)


def nbytes_of(rows: Rows) -> int:
    """Of their values."""
    return sum(
        value.values.nbytes if isinstance(value, Ragged) else value.nbytes
        for value in rows.values()
    )
