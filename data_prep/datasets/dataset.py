"""Read samples of a data set, for the commands that look at one.

All storage layouts of HDF5 are supported. Samples are read in ranges of a few MB, and only the
given fields. Each shard is compared with the index before samples are read from it.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from data_prep.datasets.shards import OpenShard
from hpctrain.base.terminal.terminal import few
from hpctrain.data.shards import index as index_file
from hpctrain.data.shards.field import Field, check_name
from hpctrain.data.shards.index import Index, Split
from hpctrain.data.shards.types import Array
from hpctrain.errors import ConfigError, DataError


class DataSet:
    """A folder with an index. Shards are opened when they are read."""

    def __init__(self, folder: Path) -> None:
        self.folder = Path(folder)
        self.index = Index.load(self.folder)
        if problem := _damage(self.index):
            raise DataError(f"{self.folder}/{index_file.FILE} is damaged: {problem}")

    def splits(self, name: str | None = None) -> list[Split]:
        """Return a list with the named split, or with all splits."""
        if name is not None and name not in self.index.splits:
            raise ConfigError(f"--split {name!r}: there are {few(self.index.splits, 30)}")
        names = self.index.splits if name is None else (name,)
        return [self.index.split(name) for name in names]

    def fields(self, names: Sequence[str] = ()) -> dict[str, Field]:
        """Return the named fields, or all fields."""
        for name in names:
            if name not in self.index.fields:
                raise ConfigError(f"--field {name!r}: there are {few(self.index.fields, 30)}")
        return {name: self.index.fields[name] for name in names or self.index.fields}

    def categories(self, field: str) -> Sequence[str]:
        """Return the names of a field's values 0, 1, …; empty if they have no names."""
        return self.index.categories.get(field, ())

    def take(
        self, split: Split, fields: Mapping[str, Field], numbers: Sequence[int]
    ) -> Iterator[tuple[int, dict[str, Array]]]:
        """Yield (number, sample) for these numbers of samples in a split, which must ascend."""
        first = 0
        for shard in split.shards:
            last = first + shard.count
            here = [number for number in numbers if first <= number < last]
            if here:
                opened = OpenShard(self.folder / shard.path, shard, fields)
                for number in here:
                    at = number - first
                    yield number, {name: opened.rows(name, at, at + 1)[0] for name in fields}
            first = last


def _damage(index: Index) -> str:
    """Return what is wrong with an index that could be parsed; "" if nothing is."""
    if not index.fields or not index.shards:
        return f"it lists no {'shards' if index.fields else 'fields'}"
    for what, names in (("field", index.fields), ("split", index.splits)):
        for name in names:
            try:
                check_name(name, what)
            except DataError as error:
                return str(error)
    return ""
