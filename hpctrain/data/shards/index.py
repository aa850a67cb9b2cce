"""`index.json`, which describes a data set. The login node reads it too: no torch, no h5py.

A data set is a folder of HDF5 shards (see `data.shards.shard`) and this file beside them. It
is written last, so a folder with an `index.json` is a finished data set.

    {
      "format": "hpctrain-shards",
      "version": 1,
      "digest": "xxh3_128:…",          names the data: of schema, categories and the digests of the
                                       shards in order; not of the path, nor of the provenance
      "fields": {
        "image": {"dtype": "uint8", "shape": [3, 64, 64], "variable": false},
        "text":  {"dtype": "uint8", "shape": [], "variable": true}
      },                               dtype: one of DTYPES; shape: of one sample, or of one element
                                       of a variable-length sample
      "shards": [
        {"path": "train-00000.h5",     relative, inside the folder
         "split": "train",
         "count": 4096,                samples
         "bytes": 50335744,            size of the file
         "digest": "xxh3_128:…",       of the whole file
         "elements": {"text": 91204}}  in each variable-length field; may be missing
      ],                               the order of a split's shards is the order of its samples
      "categories": {"label": ["cat", "dog"]},
                                       names of a field's values 0, 1, …; may be missing
      "group": "patient",              no two splits have samples with equal values of this field;
                                       may be missing
      "statistics": {
        "train": {
          "image": {"mean": 0.4, "std": 0.2, "min": 0, "max": 1, "nonfinite": 3, "nan": 2},
          "label": {…, "classes": {"0": 2100, "1": 1996}},
          "text": {…, "lengths": {"mean": 22.3, "std": 9.1, "min": 0, "max": 80, "total": 91204}}
        }
      },                               per split and field, of the finite values (of all elements
                                       of all samples); std is the population's; null: there are
                                       no values, or the number is beyond float64. nan: how many
                                       of the nonfinite are NaN. classes: how often each value of
                                       an integer field of shape [] occurs, if it has at most
                                       1,000. lengths: of variable-length samples
      "provenance": {                  for people and for data_prep, never part of the digest
        "command": "python -m data_prep …", "created": "2026-01-31T12:00:00+00:00",
        "versions": {"hpctrain": "0.1.0", …}, "options": {…},
        "source": {"name": "images", "files": 5000, …}
      }
    }

A reader ignores keys that it does not know. A change that a reader must not ignore has a new
version number.

The fields of HDF5 files that others wrote (`python -m data_prep index`) need not lie where
`hpctrain.data.shards.shard` says; such a field has one or more of these keys:

        "dataset": "/x/data",          its path in each file; of a variable-length field's values
        "offsets": "/x/ends",          the path of a variable-length field's offsets
        "axis": 1                      the axis of the dataset that counts the samples

    >>> index = Index.load(Path("data/digits"))
    >>> index.split("train").count
    1415
"""

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Self

import xxhash

from hpctrain.base.errors import DamageError, DataError
from hpctrain.base.files.disk import write_atomically
from hpctrain.base.files.record import Count, Finite, Record, decode, read_bytes
from hpctrain.data.shards.field import Field

FILE = "index.json"
FORMAT = "hpctrain-shards"
VERSION = 1
LARGEST = 1 << 30  # bytes; 100,000 shards take 20 MB
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_NO_ELEMENTS: Mapping[str, int] = {}  # shared by 100,000 shards


@dataclass(frozen=True, slots=True)
class Shard:
    """One HDF5 file: `count` samples, `bytes` of the file, the rest as in the module."""

    path: str
    split: str
    count: Count
    bytes: Count
    digest: str
    elements: Mapping[str, Count] = field(default_factory=lambda: _NO_ELEMENTS)

    def __post_init__(self) -> None:
        parts = self.path.split("/")  # an absolute path begins with an empty one
        if "" in parts or "." in parts or ".." in parts:
            raise DataError(f"shard {self.path!r} leaves the data set's folder")
        if self.count < 1 or self.bytes < 1:
            raise DataError(f"shard {self.path!r} lists {self.count} samples, {self.bytes} bytes")


@dataclass(frozen=True, slots=True)
class Split:
    """The shards of one split, in order, and their number of samples."""

    name: str
    shards: tuple[Shard, ...]
    count: int


@dataclass(frozen=True, slots=True)
class Lengths:
    """Statistics of the lengths of variable-length samples, in elements; `total` is their sum."""

    mean: Finite | None
    std: Finite | None
    min: Count | None
    max: Count | None
    total: Count


@dataclass(frozen=True, slots=True)
class Statistics:
    """Statistics of the finite values of a field in a split; the module describes the keys."""

    mean: int | Finite | None
    std: int | Finite | None
    min: int | Finite | None
    max: int | Finite | None
    nonfinite: Count = 0
    nan: Count = 0
    classes: Mapping[int, Count] | None = None
    lengths: Lengths | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the keys of the index, without classes or lengths where there are none."""
        # `asdict` copies each value in turn, which takes minutes for 100,000 fields.
        values = {key: getattr(self, key) for key in self.__slots__}
        values["lengths"] = self.lengths and asdict(self.lengths)
        return {k: v for k, v in values.items() if k not in ("classes", "lengths") or v is not None}


@dataclass(frozen=True)
class Index:
    """A finished data set, as in `index.json`; the module describes every key."""

    VERSION: ClassVar[int] = VERSION

    fields: Mapping[str, Field]
    shards: tuple[Shard, ...]
    statistics: Mapping[str, Mapping[str, Statistics]] = field(default_factory=dict)
    provenance: Mapping[str, Any] = field(default_factory=dict)
    categories: Mapping[str, Sequence[str]] = field(default_factory=dict)
    group: str = ""

    def __post_init__(self) -> None:
        categories = {name: tuple(values) for name, values in self.categories.items()}
        object.__setattr__(self, "categories", categories)  # the order in which they are loaded
        there = ", ".join(self.fields) or "none"
        for name in categories:
            if name not in self.fields:
                raise DataError(
                    f"categories of {name!r}: there is no such field; there are {there}"
                )
        if self.group and self.group not in self.fields:
            raise DataError(f"group {self.group!r}: there are {there}")

    @property
    def digest(self) -> str:
        """The name of the data: data sets with equal digests have equal samples in equal order."""
        schema = {name: spec.as_json() for name, spec in self.fields.items()}
        shards = [[shard.split, shard.count, shard.digest] for shard in self.shards]
        # A data set without categories has the digest that it had before there were categories.
        named = [self.categories] if self.categories else []
        content = json.dumps([FORMAT, VERSION, schema, shards, *named], sort_keys=True)
        return "xxh3_128:" + xxhash.xxh3_128_hexdigest(content.encode())

    def told(self, key: str) -> Mapping[str, Any]:
        """Return a mapping of the provenance; whoever writes shards may put anything there."""
        found = self.provenance.get(key)
        return found if isinstance(found, Mapping) else {}

    @property
    def splits(self) -> tuple[str, ...]:
        """The names of the splits, in the order of their first shard."""
        return tuple(dict.fromkeys(shard.split for shard in self.shards))

    def split(self, name: str) -> Split:
        """Return one split's shards."""
        shards = tuple(shard for shard in self.shards if shard.split == name)
        if not shards:
            there = ", ".join(self.splits) or "none"
            raise DataError(f"there is no split {name!r}; this data set has {there}")
        return Split(name, shards, sum(shard.count for shard in shards))

    def check(self, folder: Path) -> None:
        """Compare each shard's size on disk with the index: one stat each, nothing is read."""
        for shard in self.shards:
            check_shard(Path(folder) / shard.path, shard)

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Read `folder/index.json`; the shards are not read (see `check`)."""
        path = Path(folder) / FILE
        try:
            content, _ = read_bytes(path, 1, LARGEST)
        except FileNotFoundError:
            raise DataError(_why_missing(path.parent)) from None
        except DamageError as error:
            raise DataError(str(error)) from None
        return cls.loads(content, str(path))

    @classmethod
    def loads(cls, content: bytes, where: str) -> Self:
        """Parse an `index.json`; `where` names it in messages."""
        try:
            head = decode(_Head, content, where)
            if head.format != FORMAT:
                raise DataError(f"format is {head.format!r}; this is not an index of {FORMAT}")
            if head.version != VERSION:
                raise DataError(f"found version {head.version}, this hpctrain reads {VERSION}")
            # Categories may be names of folders, and those may be any bytes.
            index = decode(cls, content, where, surrogates=True)
            if index.digest != head.digest:
                raise DataError(
                    f"its digest {head.digest} does not fit its fields and shards "
                    f"({index.digest}): edited by hand? Run data_prep again"
                )
        except DamageError as error:
            raise DataError(str(error)) from None
        except DataError as error:
            raise DataError(f"{where}: {error}") from None
        return index

    def save(self, folder: Path) -> None:
        """Write `folder/index.json` whole or not at all (temporary name, fsync, rename)."""
        content = {
            "format": FORMAT,
            "version": VERSION,
            "digest": self.digest,
            "fields": {name: spec.as_json() for name, spec in self.fields.items()},
            "shards": [
                {key: value for key, value in asdict(shard).items() if key != "elements" or value}
                for shard in self.shards
            ],
            **({"categories": self.categories} if self.categories else {}),
            **({"group": self.group} if self.group else {}),
            "statistics": {
                split: {name: values.to_json() for name, values in fields.items()}
                for split, fields in self.statistics.items()
            },
            "provenance": dict(self.provenance),
        }
        text = json.dumps(content, indent=2, allow_nan=False)
        write_atomically(Path(folder) / FILE, f"{text}\n")


def is_url(source: str | Path) -> bool:
    """Return whether `source` has the form PROTOCOL://… and is not a path."""
    return _URL.match(str(source)) is not None


class _Head(Record, frozen=True):
    format: str = ""
    version: int = 0
    digest: str = ""


def check_shard(path: Path, shard: Shard) -> None:
    """Compare the size of a shard's file with the index."""
    try:
        size = os.stat(path).st_size
    except FileNotFoundError:
        raise DataError(f"shard {path} is missing; {FILE} lists it") from None
    except OSError as error:
        raise DataError(f"shard {path} cannot be read: {error.strerror}") from None
    if size != shard.bytes:
        what = "truncated" if size < shard.bytes else "changed"
        raise DataError(f"shard {path} is {what}: it has {size} bytes, {FILE} lists {shard.bytes}")


def _why_missing(folder: Path) -> str:
    """Return why a folder has no index."""
    if folder.is_file():
        return f"{folder} is a file; a data set is a folder"
    if not folder.exists():
        return f"the data folder {folder} does not exist"
    return (
        f"{folder} has no {FILE}: it is not a finished data set. If data_prep was "
        "interrupted here, run it again"
    )
