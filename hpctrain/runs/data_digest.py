"""Check the data sets that a config names, and compute their digest. Only metadata is read."""

import difflib
import functools
import json
import operator
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import xxhash

from hpctrain.base.errors import ConfigError, DataError, about
from hpctrain.config.rules.metrics import fields
from hpctrain.config.schema import DataConfig, TrainConfig
from hpctrain.data.places.placement import load_index, stamp
from hpctrain.data.shards.index import FILE, Index, is_url


def data_digest(data: DataConfig, train: TrainConfig, task: Mapping[str, Any]) -> str:
    """Return the digest of the data of a valid config, of which these are sections.

    Equal digests mean equal samples in the same order. A config key that does not fit the data is a
    ConfigError; a data set that is missing, incomplete or of another format is a DataError.
    """
    if not data.path:  # a loop of one's own makes its data
        return ""
    index = _checked("data.path", data.path)
    if data.val_split is not None and data.fold is None:
        _split("data.val_split", data.val_split, data.path, index, is_evaluation=True)
    digests = [index.digest]
    if not data.mixture:
        _check_fields("data.path", index, data, task)
        count, what = _samples(digests, data, index)
        _check_batch(data, train, count, what)
    for i, part in enumerate(data.mixture):
        _part(digests, f"data.mixture[{i}]", part, data, task)
    for i, one in enumerate(data.val_sets):
        _val_set(digests, f"data.val_sets[{i}]", one, data, task)
    if len(digests) == 1:
        return digests[0]
    return "xxh3_128:" + xxhash.xxh3_128_hexdigest(json.dumps(digests).encode())


def _part(
    digests: list[str], key: str, part: Mapping[str, Any], data: DataConfig, task: Mapping[str, Any]
) -> None:
    """Check a part of the mixture; append its digests."""
    index = _checked(f"{key}.path", part["path"])
    _check_fields(key, index, data, task)
    own = f"{key}.split" if "split" in part else "data.train_split"
    count = _split(own, part.get("split", data.train_split), part["path"], index)
    digests.append(index.digest)
    if data.subset is not None:
        _subset(digests, data, count)


def _val_set(
    digests: list[str], key: str, one: Mapping[str, Any], data: DataConfig, task: Mapping[str, Any]
) -> None:
    """Check one of the other evaluation sets; append its digest, if it is another data set."""
    path = one.get("path", data.path)
    index = _checked(f"{key}.path", path)
    _check_fields(f"{key}.path", index, data, task, trains=False)
    own = f"{key}.split" if "split" in one else "data.val_split"
    split = str(one.get("split", data.val_split))
    _split(own, split, path, index, is_evaluation=own == "data.val_split")
    if "path" in one:
        digests.append(index.digest)


def most_samples(data: DataConfig) -> int | None:
    """Return at most how many samples an epoch has; None if the index alone does not tell it."""
    if data.mixture or data.windows.field is not None:
        return None
    count, _ = _samples([], data, load_index(data.path))
    return count * data.repeat


def _samples(digests: list[str], data: DataConfig, index: Index) -> tuple[int, str]:
    """Return the number of samples without `data.repeat`, and their name in words."""
    count = _split("data.train_split", data.train_split, data.path, index)
    what = f"the split {data.train_split!r} of {data.path}"
    if data.subset is not None:
        count = _subset(digests, data, count)
        what = f"data.subset={data.subset} of {what}"
    if data.fold is not None:
        count = _fold(digests, data, index, count)
        what = f"{what} without data.fold={data.fold}"
    return count, what


def _subset(digests: list[str], data: DataConfig, count: int) -> int:
    """Return the number of samples in `data.subset`; append the digest of its indices.

    Of groups it is the number of all samples.
    """
    subset = str(data.subset)
    of_groups = data.group is not None and not subset.endswith(".npy")
    # The number of groups, or of windows, is only known from the shards.
    known = not of_groups and data.windows.field is None
    try:
        length, digest = _parse_subset(subset, count if known else 2**62, stamp(subset))
    except (ConfigError, DataError) as error:
        raise about(f"data.subset={subset}", error) from error
    digests.extend(digest)
    return count if of_groups else length


def _fold(digests: list[str], data: DataConfig, index: Index, count: int) -> int:
    """Return at most how many samples are left; append what the folds follow from."""
    assert data.fold_of is not None
    folds = data.fold_of[1]
    group = data.group or index.group
    if data.group is None and group:
        digests.append(f"group:{group}")
    what, there = "samples", index.split(data.train_split).count
    if group:
        statistics = index.statistics.get(data.train_split, {}).get(group)
        what, there = f"values of {group}", len((statistics and statistics.classes) or range(there))
    if folds > there:
        raise ConfigError(
            f"data.fold={data.fold}: the split {data.train_split!r} has {there} {what}; at most so "
            "many folds"
        )
    # The size of a fold of whole groups is only known from the samples.
    return count if group or data.subset is not None else count - count // folds


@functools.lru_cache(maxsize=16)
def _parse_subset(subset: str, count: int, stamp: object) -> tuple[int, list[str]]:
    from hpctrain.data.samplers.subset import parse_subset  # importing numpy takes 0.15 s

    indices = parse_subset(subset, count)
    if isinstance(indices, range):
        return len(indices), []
    return len(indices), [xxhash.xxh3_128_hexdigest(indices.astype("int64").tobytes())]


def _checked(key: str, path: str) -> Index:
    try:
        return _whole(path, stamp(f"{path}/{FILE}"))
    except DataError as error:
        missing = not is_url(path) and not Path(path).exists()
        hint = "; `python -m data_prep --help` shows how to write one" if missing else ""
        raise DataError(f"{key}: {error}{hint}") from error


@functools.lru_cache(maxsize=16)
def _whole(path: str, stamp: object) -> Index:
    """Return an index whose shards have the right sizes: most runs of a sweep share a data set."""
    index = load_index(path)
    if not is_url(path):
        index.check(Path(path))
    return index


def _check_fields(
    key: str, index: Index, data: DataConfig, task: Mapping[str, Any], *, trains: bool = True
) -> None:
    """Check the fields that the config names; some are for the order of a training."""
    for name, field, kind in _fields(data, trains):
        _check_field(key, index, data, name, field, kind)
    if data.transforms or data.batch_transforms:  # they may make any field
        return
    available = _available(index, data)
    for name, field in fields(task):
        # Batches may also have FIELD_length, FIELD_offsets and FIELD_document.
        if not {field, re.sub(r"_(length|offsets|document)$", "", field)} & {*available}:
            near = difflib.get_close_matches(field, available, 1)
            hint = f"did you mean {near[0]}? " if near else ""
            raise ConfigError(f"{name}={field}: {hint}the samples have {', '.join(available)}")


def _check_field(
    key: str, index: Index, data: DataConfig, name: str, field: str, kind: str | None
) -> None:
    """Check a field that the config key `name` names: it is there, and of this kind."""
    if field not in index.fields:
        existing = ", ".join(f"{each} {spec}" for each, spec in index.fields.items())
        raise ConfigError(f"{name}={field}: the fields of {key} are {existing}")
    spec = index.fields[field]
    if kind is not None and spec.variable != (kind == "variable-length"):
        raise ConfigError(f"{name}={field}: it must be a {kind} field; it is {spec}")
    if kind == "fixed-size" and spec.shape:
        raise ConfigError(f"{name}={field}: it must be one number a sample; it is {spec}")
    if name == "data.balance" and "int" not in spec.dtype:
        raise ConfigError(f"{name}={field}: classes are integers; it is {spec}")
    if data.fields is not None and field not in data.fields and kind == "variable-length":
        raise ConfigError(f"{name}={field}: data.fields must list it")


def _available(index: Index, data: DataConfig) -> list[str]:
    """Return the fields of a batch, without those that only say where a sample begins or ends."""
    if data.windows.field is not None:
        return [data.windows.field]
    return [name for name in index.fields if data.fields is None or name in data.fields]


# Each config key that names a field of the data, the kind that it must have, and whether it is only
# for the order of a training.
_NAMING = (
    ("group", None, True),
    ("windows.field", "variable-length", False),
    ("images.field", "variable-length", False),
    ("buckets.field", "variable-length", True),
    ("balance", "fixed-size", True),
)


def _fields(data: DataConfig, trains: bool) -> Iterator[tuple[str, str, str | None]]:
    """Yield each config key that names a field, the field, and the kind that it must have."""
    for field in data.fields or []:
        yield "data.fields", field, None
    for key, kind, only_training in _NAMING:
        field = operator.attrgetter(key)(data)
        if field is not None and (trains or not only_training):
            yield f"data.{key}", field, kind


def _split(key: str, split: str, path: str, index: Index, *, is_evaluation: bool = False) -> int:
    """Return the number of samples in the split that `key` names, of the data set in `path`."""
    try:
        return index.split(split).count
    except DataError as error:
        cures = f"; {cures}" if (cures := _cures(index, is_evaluation)) else ""
        raise DataError(f"{key}={split}: {path}: {error}{cures}") from error


def _cures(index: Index, is_evaluation: bool) -> str:
    """Return what to do about a split that is not there; "" if there is nothing."""
    cures = []
    if is_evaluation and len(index.splits) == 1:
        cures.append("write it with `--split train=0.9,val=0.1` of data_prep")
    elif len(index.splits) > 1:
        cures.append("choose one of them")
    if is_evaluation:
        cures.append("train without evaluation: data.val_split=null")
    return ", or ".join(cures)


def _check_batch(data: DataConfig, train: TrainConfig, count: int, what: str) -> None:
    """Check the batch size, if the index alone gives the number of samples."""
    known = data.windows.field is None and data.tail == "drop"
    if known and (size := train.global_batch_size) > count * data.repeat:
        raise ConfigError(
            f"train.global_batch_size={size}, but {what} has {count} samples: at most that many, "
            "or data.tail=pad"
        )
