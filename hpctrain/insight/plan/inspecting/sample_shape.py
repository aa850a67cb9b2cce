"""The shape of a sample, from the data set or from the command line; no data is read.

data.path/index.json ──┐
--sample-shape 8193 ───┴── a batch on the meta device
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from hpctrain.base.errors import ConfigError, DataError, about
from hpctrain.config.schema import DataConfig
from hpctrain.data.places.placement import load_index
from hpctrain.data.samplers.subset import parse_subset
from hpctrain.data.shards.index import Shard
from hpctrain.data.shards.types import Batch
from hpctrain.data.sources.reader import Reader
from hpctrain.data.sources.windows import Windows
from hpctrain.engine.tasks.task import name_of
from hpctrain.runs.data_digest import most_samples

_EXAMPLES = "8193 (tokens of a window) or 3x224x224"


def parse_shape(text: str) -> tuple[int, ...]:
    """Return the shape of `--sample-shape`."""
    if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", text):
        raise ConfigError(
            f"--sample-shape={text}: it must be numbers with x between: {_EXAMPLES}; other samples "
            "need a data set (data.path)"
        )
    return tuple(map(int, text.split("x")))


def of_shape(task: Any, shape: tuple[int, ...]) -> Batch:
    """Return a sample: tokens, or an input of floats of this shape, whose target is one integer."""
    tokens = getattr(task, "tokens", None)
    if tokens is not None:
        if len(shape) != 1 or shape[0] < 2:
            raise ConfigError(
                f"--sample-shape={'x'.join(map(str, shape))}: the task predicts tokens, so it is "
                "the number of tokens of a window, at least 2, such as 8193"
            )
        return sample_of(dict.fromkeys((tokens, f"{tokens}_document"), (shape, torch.int64)))
    if not hasattr(task, "input"):
        raise ConfigError(
            f"--sample-shape: task._target_={name_of(task)} does not say which field is the "
            "model's input (attribute `input` or `tokens`); give data.path instead"
        )
    targets = _names(getattr(task, "target", None))
    inputs = dict.fromkeys(_names(task.input), (shape, torch.float32))
    return sample_of(inputs | dict.fromkeys(targets, ((), torch.int64)))


def _names(field: Any) -> list[str]:
    return [] if not field else [field] if isinstance(field, str) else list(field)


def sample_of(fields: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> Batch:
    """Return a batch of one sample without memory."""
    made = {n: torch.empty((1, *s), dtype=dtype, device="meta") for n, (s, dtype) in fields.items()}
    return {"mask": torch.empty(1, dtype=torch.bool, device="meta"), **made}


def of_data(data: DataConfig) -> Batch:
    """Return a sample by the index of the data set; a ConfigError if a field's length varies."""
    path = data.mixture[0]["path"] if data.mixture else data.path
    fields: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    for name, field in load_index(path).fields.items():
        if data.fields and name not in data.fields and name != data.windows.field:
            continue
        shape = tuple(field.shape)
        dtype = getattr(torch, str(field.dtype), torch.int64)
        if name == data.windows.field and data.windows.length is not None:
            shape, dtype = (data.windows.length,), torch.int64
            fields[f"{name}_document"] = shape, dtype
        elif name == data.images.field:
            size = data.images.size or [224, 224]
            shape, dtype = (3, size[0], size[1]), torch.uint8
        elif field.variable:
            raise ConfigError(
                f"{path}: {name} has another length in each sample; --sample-shape says which "
                f"length to plan for: {_EXAMPLES}"
            )
        fields[name] = shape, dtype
    return sample_of(fields)


def samples_of_epoch(data: DataConfig) -> int:
    """Return the number of samples of an epoch; a DataError if there is no such data set.

    Of groups, and of a subset of which a fold is left out, it is at most this number.
    """
    if (known := most_samples(data)) is not None:
        return known
    total, windows = 0, data.windows
    for path, split, shards in _parts_of(data):
        if (name := windows.field) is not None and windows.length is not None:
            reader = Reader(path, split, [name])
            count = len(Windows(reader, name, windows.length, windows.stride))
        else:
            count = sum(shard.count for shard in shards)
        if data.subset is not None and (data.group is None or data.subset.endswith(".npy")):
            try:
                count = len(parse_subset(data.subset, count))
            except (ConfigError, DataError) as error:
                raise about(f"data.subset={data.subset}", error) from error
        total += count
    return total * data.repeat


def _parts_of(data: DataConfig) -> Iterator[tuple[str, str, list[Shard]]]:
    """Yield the folder, the split and the shards of each part of the training data."""
    for part in data.mixture or [{"path": data.path}]:
        split = part.get("split", data.train_split)
        yield part["path"], split, [s for s in load_index(part["path"]).shards if s.split == split]
