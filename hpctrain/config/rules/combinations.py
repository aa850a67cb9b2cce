"""Which keys go together: pairs.yaml has a row for each pair that does not; the rest is computed.

launch.spares, launch.nodes~-, a job with spares has one number of nodes
    launch.spares=1 with launch.nodes=1-2: a job with spares has one number of nodes

This module does not import torch.
"""

import functools
import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

from hpctrain.base.files import yaml_file
from hpctrain.config.rules.batch_sizes import BatchSizes, named_sizes
from hpctrain.config.rules.degrees import (
    Degrees,
    block_problem,
    either,
    ep_problems,
    expert_problems,
    factors,
    length_problem,
    neighbours,
    number_problems,
    parts_problem,
)
from hpctrain.config.schema import Config, all_keys
from hpctrain.config.schema.parallel import SCHEDULES

TRANSFORMER = ("hpctrain.models.Transformer", "hpctrain.models.transformer.Transformer")
_FREE = ("model.", "task.")


class _Condition(NamedTuple):
    """What must hold for one key; pairs.yaml explains the signs."""

    sign: str
    key: str
    values: list[str]
    default: Any

    @classmethod
    def of(cls, text: str) -> "_Condition":
        sign, key, values = "!", text[1:], ""
        if not text.startswith("!"):
            key, sign, values = re.fullmatch(r"([\w.]+)(!?=|~|)(.*)", text).groups()  # type: ignore[union-attr]
        known = {each.name: each.default for each in all_keys()}
        default = None if key.startswith(_FREE) else known[key]
        return cls(sign, key, values.split("|"), default)

    def met(self, config: Config) -> str:
        """Return the key with its value, for an error, or "" if the condition is not met."""
        section, _, name = self.key.partition(".")
        free = self.key.startswith(_FREE)
        value = getattr(config, section).get(name) if free else attrgetter(self.key)(config)
        text = "null" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
        text = text.lower() if isinstance(value, bool) else text
        match self.sign:
            case "":
                holds = value != self.default
            case "~" if isinstance(value, dict):
                return f"{self.key}.{self.values[0]}" if self.values[0] in value else ""
            case "~":
                holds = isinstance(value, str | list) and self.values[0] in value
            case "!":
                return "" if value and value != self.default else f"needs {self.key}"
            case _:
                holds = (text in self.values) == (self.sign == "=")
        return f"{self.key}={text}" if holds else ""


_Side = list[list[_Condition]]  # of the alternatives, each a list of what must hold


def refused(config: Config, kind: str) -> Iterator[str]:
    """Yield the error of each row of a kind that a config meets."""
    for first, second, why in _rows()[kind]:
        for one in _met(config, first):
            for other in _met(config, second):
                pair = f"{one} {'' if other.startswith('needs ') else 'with '}{other}"
                yield f"{pair}: {why}" if why else pair


def meets(config: Config, side: str, degrees: Degrees) -> bool:
    """Return whether a config with these degrees meets what a side of a row would say."""
    return any(_met(_with(config, degrees), _side(side)))


def _with(config: Config, degrees: Degrees) -> Config:
    return replace(config, parallel=replace(config.parallel, **vars(degrees)))


def _met(config: Config, side: _Side) -> Iterator[str]:
    for conditions in side:
        if all(met := [condition.met(config) for condition in conditions]):
            yield " and ".join(met)


@functools.cache
def _rows() -> dict[str, list[tuple[_Side, _Side, str]]]:
    table = yaml_file.read(Path(__file__).with_name("pairs.yaml"))
    return {
        kind: [(_side(first), _side(second), why) for first, second, why in rows]
        for kind, rows in table.items()
    }


def _side(text: str) -> _Side:
    return [[_Condition.of(one) for one in part.split()] for part in text.split(", ")]


def parallel_problems(config: Config, degrees: Degrees) -> Iterator[str]:
    """Yield what does not fit together in `parallel`, `precision` and `train`."""
    parallel = config.parallel
    if (kept := parallel.fsdp.reshard_after_forward) is not None:
        yield from _resharded(kept, parallel.zero, degrees.dp_shard)
    filled_in = _with(config, degrees)
    for kind in ("run", "adapters", "sync", "weights"):
        yield from refused(filled_in, kind)
    if parallel.ep > 1:
        yield from ep_problems(degrees, parallel.ep)
    if degrees.pp > 1:
        yield from _pipeline(config, degrees)


def _resharded(kept: int, zero: int, dp_shard: int) -> Iterator[str]:
    """Yield why parameters cannot stay divided over `kept` ranks."""
    key = f"parallel.fsdp.reshard_after_forward={kept}"
    if zero != 3:
        yield f"{key} divides parameters, which parallel.zero={zero} does not"
    elif dp_shard % kept:
        allowed = ", ".join(map(str, ["null", *factors(dp_shard)[1:]]))
        yield f"{key}: it must be a factor of dp_shard {dp_shard}: {allowed}"


def sync_problems(config: Config, degrees: Degrees) -> Iterator[str]:
    """Yield why `train.sync_batchnorm=true` is impossible."""
    train = replace(config.train, sync_batchnorm=True)
    return refused(_with(replace(config, train=train), degrees), "sync")


def _pipeline(config: Config, degrees: Degrees) -> Iterator[str]:
    """Yield what does not fit the stages of a pipeline."""
    parallel, train, pp = config.parallel, config.train, degrees.pp
    schedule, blocks = parallel.pipeline.schedule, parallel.pipeline.blocks
    stages, key = pp * SCHEDULES[schedule], f"parallel.pipeline.schedule={schedule}"
    if blocks is not None and len(blocks) != stages:
        yield (
            f"parallel.pipeline.blocks={blocks} has {len(blocks)} numbers: parallel.pp={pp} with "
            f"{key} makes {stages} stages, and each has one"
        )
    elif blocks is not None and min(blocks) < 1:
        yield f"parallel.pipeline.blocks={blocks}: each stage needs at least 1 block"
    if config.data.collate != "pack" and train.micro_batch_size != "auto":
        for key, size in named_sizes(train).items():
            if size % degrees.dp == 0:
                yield from _micro_batches(config, degrees, key, size)


def _micro_batches(config: Config, degrees: Degrees, key: str, size: int) -> Iterator[str]:
    """Yield why the number of micro-batches of a global batch does not fit the schedule."""
    train, pp, schedule = config.train, degrees.pp, config.parallel.pipeline.schedule
    sizes = BatchSizes.of(train, config.parallel, degrees, size)
    parts, share = sizes.accumulate, sizes.share
    if parts == 0 or share % parts or not (reason := parts_problem(schedule, pp, parts)):
        return
    fitting = [n for n in factors(share) if not parts_problem(schedule, pp, n)]
    near = neighbours(fitting, parts)
    if not near:
        advice = f"{key}={size} is too small for {pp} of them"
    elif train.micro_batch_size is None:
        advice = f"use train.accumulate={either(near)}"
    else:
        advice = f"use train.micro_batch_size={either(share // n for n in near)}"
    stage = f" and {key}={size}" if train.batch_size_ramp else ""
    yield f"parallel.pipeline.schedule={schedule} with parallel.pp={pp}{stage}: {reason}; {advice}"


def division_problems(config: Config, degrees: Degrees) -> Iterable[str]:
    """Return what the degrees do not divide."""
    is_known = config.model.get("_target_") in TRANSFORMER
    return _divisions(config, degrees) if is_known else ()


def _divisions(config: Config, degrees: Degrees) -> Iterator[str]:
    experts = config.model.get("experts")
    if isinstance(experts, int):
        yield from expert_problems("model.experts", experts, degrees, config.parallel)
    layers = config.model.get("layers")
    if degrees.pp > 1 and isinstance(layers, int):
        what = f"model.layers={layers} gives {layers} blocks"
        if problem := block_problem(what, layers, config.parallel, degrees.pp):
            yield problem
    if degrees.ranks == degrees.dp:
        return
    heads = config.model.get("heads")
    numbers = {name: config.model.get(name) for name in ("heads", "kv_heads", "hidden")}
    numbers["kv_heads"] = numbers["kv_heads"] or heads
    known = {f"model.{name}": n for name, n in numbers.items() if isinstance(n, int) and n > 0}
    yield from number_problems(known, degrees.tp)
    if config.data.windows.field is not None:
        tp = degrees.tp if config.parallel.sequence_parallel else 1
        length = config.data.windows.length
        # The last token is only a target.
        if problem := length_problem(length - 1, degrees.cp, tp, more=1):
            yield f"data.windows.length={length}: {problem}"
