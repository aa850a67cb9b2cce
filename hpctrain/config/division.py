"""What the degrees of parallelism must divide: the heads of a model, the length of a sequence.

Of hpctrain's own Transformer the config says these numbers, so they are checked before a job is
queued. Of other models they are known when the model is built.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping

from hpctrain.config.degrees import Degrees
from hpctrain.config.schema import Config

_TRANSFORMER = ("hpctrain.models.Transformer", "hpctrain.models.transformer.Transformer")


def division_problems(config: Config, degrees: Degrees) -> Iterator[str]:
    """Yield what the degrees do not divide.

    Args:
        config: Every value by itself is valid.
        degrees: The degrees for the number of ranks.
    """
    if config.model.get("_target_") not in _TRANSFORMER:
        return
    experts = config.model.get("experts")
    if isinstance(experts, int):
        yield from expert_problems("model.experts", experts, degrees, config.parallel.ep)
    if degrees.ranks == degrees.dp:
        return
    heads = config.model.get("heads")
    numbers = {name: config.model.get(name) for name in ("heads", "kv_heads", "hidden")}
    numbers["kv_heads"] = numbers["kv_heads"] or heads
    known = {f"model.{name}": n for name, n in numbers.items() if isinstance(n, int) and n > 0}
    yield from number_problems(known, degrees.tp)
    if config.data.windows.field is not None and config.data.windows.length is not None:
        divided = config.parallel.sequence_parallel
        parts = (degrees.tp if divided else 1) * (2 * degrees.cp if degrees.cp > 1 else 1)
        positions = config.data.windows.length - 1  # the last token is only a target
        if positions % parts:
            near = [n + 1 for n in nearest(positions, parts)]
            yield (
                f"data.windows.length={config.data.windows.length} has {positions} positions, "
                f"which {parts} parts (cp {degrees.cp}, tp {degrees.tp}) do not divide evenly: use "
                f"a length of {' or '.join(map(str, near))}"
            )


def expert_problems(name: str, experts: int, degrees: Degrees, ep: int) -> Iterator[str]:
    """Yield why the experts of a model cannot be computed with these degrees.

    Args:
        name: What holds the experts.
        experts: Their number in a layer.
        degrees: The degrees.
        ep: The ranks that divide the experts.
    """
    for degree in ("cp", "pp") if ep == 1 else ("cp", "tp", "pp"):
        if (size := getattr(degrees, degree)) > 1:
            yield (
                f"{name}={experts} with parallel.ep={ep} and {degree} {size}: experts are divided "
                f"over data-parallel ranks, use {degree} 1"
            )
    if experts % ep:
        near = " or ".join(map(str, _near_factors(experts, ep)))
        yield f"parallel.ep={ep} does not divide {name}={experts}: use {near}"


def ep_problems(degrees: Degrees, ep: int) -> Iterator[str]:
    """Yield if ep does not divide the data-parallel ranks.

    Args:
        degrees: The degrees.
        ep: The ranks that divide the experts.
    """
    name = "dp_shard" if degrees.dp_shard > 1 else "dp_replicate"
    if (size := getattr(degrees, name)) % ep:
        near = " or ".join(map(str, _near_factors(size, ep)))
        yield f"parallel.ep={ep} does not divide {name} {size}: use {near}"


def _near_factors(number: int, factor: int) -> list[int]:
    """Return the factors of `number` next to `factor`, which is none."""
    fitting = [n for n in range(1, number + 1) if number % n == 0]
    return [*[n for n in fitting if n < factor][-1:], *[n for n in fitting if n > factor][:1]]


def nearest(number: int, divisor: int) -> list[int]:
    """Return the multiples of `divisor` next to `number`, of which the lower may be missing."""
    below = number // divisor * divisor
    return [n for n in (below, below + divisor) if n > 0]


def number_problems(numbers: Mapping[str, int], tp: int) -> Iterator[str]:
    """Yield which numbers of a model tp does not divide, with the nearest tp that does.

    Args:
        numbers: The number of heads, for example, by name.
        tp: The ranks that divide each layer.
    """
    near = _near_factors(math.gcd(*numbers.values()), tp)
    for name, number in numbers.items():
        if number % tp:
            yield (
                f"parallel.tp={tp} does not divide {name}={number}: use "
                f"{' or '.join(map(str, near))}"
            )


def names_module(pattern: str, name: str) -> bool:
    """Return whether a pattern of a plan, in which * stands for one part, names a module."""
    return re.fullmatch(re.escape(pattern).replace(r"\*", r"[^.]+"), name) is not None
