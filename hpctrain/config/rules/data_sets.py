"""What must hold in `data`: its mixture, what is evaluated, folds, groups, and how it is read."""

import math
from collections.abc import Iterator

from hpctrain.config.schema import DataConfig


def problems(data: DataConfig) -> Iterator[str]:
    """Yield what is wrong with the form of `data.mixture` and `data.val_sets`."""
    for i, part in enumerate(data.mixture):
        key = f"data.mixture[{i}]"
        if not all(isinstance(part.get(needed), str) for needed in ("name", "path")):
            yield f"{key}={part}: it must be {{name: ..., path: ..., weight: ..., split: ...}}"
            return
        for unknown in part.keys() - {"name", "path", "weight", "split"}:
            yield f"{key}.{unknown} is unknown: a part has name, path, weight and split"
        weight = part.get("weight", 1)
        if not isinstance(weight, (int, float)) or not 0 <= weight < math.inf:
            yield f"{key}.weight={weight}: it must be a number, at least 0"
    names = [part["name"] for part in data.mixture]
    for name in {name for name in names if names.count(name) > 1}:
        yield f"data.mixture: {names.count(name)} parts are named {name}"
    weights = [part.get("weight") for part in data.mixture]
    if None in weights and weights != [None] * len(weights):
        yield "data.mixture: give each part a weight, or none of them"
    elif weights and None not in weights and not any(weights):
        yield "data.mixture: the weights are all 0; one must be greater"


def val_set_problems(data: DataConfig) -> Iterator[str]:
    """Yield what is wrong with the form of `data.val_sets`."""
    names = [str(one.get("name")) for one in data.val_sets]
    for i, one in enumerate(data.val_sets):
        key = f"data.val_sets[{i}]"
        texts = all(isinstance(value, str) and value for value in one.values())
        if not texts or not {"name"} < {*one} <= {"name", "path", "split"}:
            yield (
                f"{key}={one}: it must be {{name: ..., path: ..., split: ...}}, of which path "
                "or split may be left out"
            )
        elif "/" in one["name"]:
            yield f"{key}.name={one['name']}: it is a part of the names of metrics, without a '/'"
        elif names.count(one["name"]) > 1:
            yield f"{key}.name={one['name']}: another set has this name"
        elif "split" not in one and data.val_split is None:
            yield f"{key}={one}: data.val_split is null, so it needs a split"


def between(data: DataConfig) -> Iterator[str]:
    """Yield what is wrong between the sets, where they are and how they are read."""
    trained = data.path, data.train_split
    for i, one in enumerate(data.val_sets if data.fold is not None else ()):
        if (one.get("path", data.path), one.get("split", data.val_split)) == trained:
            yield (
                f"data.fold={data.fold} with data.val_sets[{i}]={one}: the training split has the "
                "samples of both, the fold and the training"
            )
    for url in (path for path in data.paths if "://" in path and data.stage == "none"):
        yield f"data.stage=none: {url} cannot be read in place; use auto, which copies shards"
