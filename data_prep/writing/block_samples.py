"""The samples of a block: which ones can be used, their bytes, and their splits."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from data_prep.formats.samples import text_of
from data_prep.source import BadRecords, InputSource, SampleBlock
from data_prep.writing.sample_schema import check_batch
from data_prep.writing.split import ByColumn, ByFile, Split
from hpctrain.base.errors import DataError
from hpctrain.data.shards.field import name_problem
from hpctrain.data.shards.ragged import Ragged, hash_keys, hash_rows, offsets_of, row_bytes
from hpctrain.data.shards.types import Array, Int64s

Rows = Mapping[str, Array | Ragged]


@dataclass(frozen=True)
class BlockSamples:
    """Some or all samples of a block."""

    block: SampleBlock  # the block
    rows: Rows  # the values of the samples, field by field, as the schema says
    which: Int64s  # the position of each sample in the block, (n,)

    @classmethod
    def of(cls, block: SampleBlock, source: InputSource) -> "BlockSamples":
        """Return all samples of a block."""
        try:
            rows = check_batch(block.values, source.fields)
            count = len(next(iter(rows.values())))
            for what in ("keys", "column"):
                given = getattr(block, what)
                if given is not None and len(given) != count:
                    raise DataError(f"a block of {count} samples has {len(given)} {what}")
        except DataError as error:
            raise DataError(f"{block.file or source.name}: {error}") from None
        return cls(block, rows, np.arange(count))

    def __len__(self) -> int:
        return len(self.which)

    def only(self, mask: NDArray[np.bool_]) -> "BlockSamples":
        """Return the samples where `mask`, (n,), is set."""
        if mask.all():
            return self
        return BlockSamples(self.block, _only(self.rows, mask), self.which[mask])

    def split_keys(self) -> Sequence[bytes]:
        """Return the key of each sample that decides its split.

        A block without keys has the bytes of the fields, with the length of each sequence.
        """
        if (keys := self.block.keys) is not None:
            return keys if len(self) == len(keys) else [keys[i] for i in self.which.tolist()]
        parts = [row_bytes(value) for value in self.rows.values()]
        return parts[0] if len(parts) == 1 else list(map(b"".join, zip(*parts, strict=True)))

    def splits(self, split: Split) -> tuple[Sequence[str], NDArray[np.intp]]:
        """Return the names of splits, and for each sample the number of its name, (n,)."""
        if isinstance(split, ByColumn):
            names: dict[str, int] = {}
            texts = self._texts(split.column)
            numbers = [names.setdefault(text, len(names)) for text in texts]
            return list(names), np.array(numbers, np.intp)
        if isinstance(split, ByFile):
            return [split.of_file(self.block.file)], np.zeros(len(self), np.intp)
        if len(split.fractions) == 1:
            return list(split.fractions), np.zeros(len(self), np.intp)
        return list(split.fractions), split.numbers(hash_keys(self.split_keys()))

    def groups(self, name: str) -> NDArray[np.uint64]:
        """Return the key of each sample's group, by a field or by the column of the block, (n,)."""
        if name in self.rows:
            return hash_rows(self.rows[name])
        return hash_keys(text.encode() for text in self._texts(name))

    def _texts(self, name: str) -> list[str]:
        """Return the value of each sample in the column of the block, or else in a field."""
        column = self.block.column
        if column is None:
            return [text_of(np.asarray(value)) for value in self.rows[name]]
        return [str(column[i]) for i in self.which.tolist()]

    def finite(self, problems: BadRecords) -> "BlockSamples":
        """Return the samples whose values are all finite; report the others."""
        why: dict[int, str] = {}
        for name, value in self.rows.items():
            array = value.values if isinstance(value, Ragged) else value
            if array.dtype.kind == "f" and not np.isfinite(array).all():
                for i, sample in enumerate(value):
                    if bad := int((~np.isfinite(sample)).sum()):
                        why.setdefault(i, f"field {name!r} has {bad} NaN or infinite values")
        return self._without(why, problems)

    def named(self, split: ByColumn, problems: BadRecords) -> "BlockSamples":
        """Return the samples whose column holds a valid split name; report the others."""
        names, numbers = self.splits(split)
        reasons = [name_problem(name, f"column {split.column!r}: split") for name in names]
        why = {i: reasons[number] for i, number in enumerate(numbers.tolist()) if reasons[number]}
        return self._without(why, problems)

    def _without(self, why: Mapping[int, str], problems: BadRecords) -> "BlockSamples":
        """Return the samples without these, which are reported with the reasons."""
        good = np.ones(len(self), bool)
        good[list(why)] = False
        for i, reason in why.items():
            place, records = int(self.which[i]), self.block.records
            record = f"sample {place}" if records is None else records(place)
            problems.bad(self.block.file, record, reason)
        return self.only(good)


def _only(rows: Rows, mask: NDArray[np.bool_]) -> Rows:
    return {name: _chosen(value, mask) for name, value in rows.items()}


def _chosen(value: Array | Ragged, mask: NDArray[np.bool_]) -> Array | Ragged:
    if not isinstance(value, Ragged):
        return value[mask]
    lengths = value.lengths
    return Ragged(value.values[np.repeat(mask, lengths)], offsets_of(lengths[mask]))


def by_split(
    rows: Rows, names: Sequence[str], numbers: NDArray[np.intp]
) -> Iterator[tuple[str, Rows]]:
    """Yield (split, samples) for each split that has samples, in the order of the names."""
    counts = np.bincount(numbers, minlength=len(names)).tolist()
    for place, name in enumerate(names):
        if counts[place]:
            yield name, rows if counts[place] == len(numbers) else _only(rows, numbers == place)


def nbytes_of(rows: Rows) -> int:
    """Return the size of all values in bytes."""
    return sum(
        value.values.nbytes if isinstance(value, Ragged) else value.nbytes
        for value in rows.values()
    )
