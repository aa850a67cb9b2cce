"""What the degrees of parallelism must divide: the heads of a model, the length of a sequence.

Of hpctrain's own Transformer the config says these numbers, so they are checked before a job is
queued. Of other models they are known when the model is built.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterator, Mapping

from hpctrain.config.rules.degrees import Degrees
from hpctrain.config.rules.own_models import TRANSFORMER
from hpctrain.config.schema import Config, ParallelConfig


def division_problems(config: Config, degrees: Degrees) -> Iterator[str]:
    """Yield what the degrees do not divide."""
    if config.model.get("_target_") not in TRANSFORMER:
        return
    experts = config.model.get("experts")
    if isinstance(experts, int):
        limited = config.model.get("capacity") is not None
        yield from expert_problems(
            "model.experts", experts, degrees, config.parallel, capacity=limited
        )
    if degrees.ranks == degrees.dp:
        return
    heads = config.model.get("heads")
    numbers = {name: config.model.get(name) for name in ("heads", "kv_heads", "hidden")}
    numbers["kv_heads"] = numbers["kv_heads"] or heads
    known = {f"model.{name}": n for name, n in numbers.items() if isinstance(n, int) and n > 0}
    yield from number_problems(known, degrees.tp)
    if config.data.windows.field is not None and config.data.windows.length is not None:
        parts = sequence_parts(degrees.cp, degrees.tp if config.parallel.sequence_parallel else 1)
        positions = config.data.windows.length - 1  # the last token is only a target
        if positions % parts:
            near = [n + 1 for n in nearest(positions, parts)]
            yield (
                f"data.windows.length={config.data.windows.length} has {positions} positions, "
                f"which {parts} parts (cp {degrees.cp}, tp {degrees.tp}) do not divide evenly: use "
                f"a length of {' or '.join(map(str, near))}"
            )


def expert_problems(
    name: str, experts: int, degrees: Degrees, parallel: ParallelConfig, *, capacity: bool
) -> Iterator[str]:
    """Yield why the experts of a model cannot be computed with these degrees.

    `name` holds `experts` of them in a layer; `capacity` is whether the tokens of one are limited.
    """
    ep, schedule = parallel.ep, parallel.pipeline.schedule
    if ep > 1 and degrees.tp > 1:
        yield (
            f"{name}={experts} with parallel.ep={ep} and tp {degrees.tp}: data-parallel ranks "
            "divide the experts, use ep 1 or tp 1"
        )
    if degrees.pp > 1 and schedule in ("zbv", "interleaved_zb"):
        yield (
            f"{name}={experts} with parallel.pipeline.schedule={schedule}: use gpipe, 1f1b or "
            "interleaved, experts need a backward pass in one piece"
        )
    parts = degrees.cp * (degrees.tp if parallel.sequence_parallel else 1)
    if capacity and parts > 1:
        yield (
            f"{name}={experts} with a capacity, which limits the tokens of whole samples, but "
            f"these are divided into {parts} parts: use model.capacity=null, or cp 1 and "
            "parallel.sequence_parallel=false"
        )
    if experts % ep:
        near = " or ".join(map(str, _near_factors(experts, ep)))
        yield f"parallel.ep={ep} does not divide {name}={experts}: use {near}"


def ep_problems(degrees: Degrees, ep: int) -> Iterator[str]:
    """Yield if ep does not divide the data-parallel ranks, times cp."""
    name = "dp_shard" if degrees.dp_shard > 1 else "dp_replicate"
    size = getattr(degrees, name) * degrees.cp
    if size % ep:
        near = " or ".join(map(str, _near_factors(size, ep)))
        name += f" {getattr(degrees, name)} x cp" if degrees.cp > 1 else ""
        yield f"parallel.ep={ep} does not divide {name} {size}: use {near}"


def _near_factors(number: int, factor: int) -> list[int]:
    """Return the factors of `number` next to `factor`, which is none."""
    fitting = [n for n in range(1, number + 1) if number % n == 0]
    return [*[n for n in fitting if n < factor][-1:], *[n for n in fitting if n > factor][:1]]


def sequence_parts(cp: int, tp: int) -> int:
    """Return the number of equal parts into which a sequence must be divisible.

    Context parallel gives each rank two chunks of the same length. Sequence parallel divides these
    two together.
    """
    return tp if cp == 1 else cp * math.lcm(2, tp)


def length_problem(length: int, cp: int, tp: int) -> str:
    """Return why such a sequence cannot be divided, with the nearest lengths; "" if it can."""
    parts = sequence_parts(cp, tp)
    if length % parts == 0:
        return ""
    given = " with ".join(f"parallel.{k}={n}" for k, n in (("cp", cp), ("tp", tp)) if n > 1)
    verb = "does not divide" if cp == 1 else f"needs {parts} equal parts of"
    without = ", or parallel.sequence_parallel=false"
    return (
        f"{given} {verb} the {length} positions of a sample: use "
        f"{' or '.join(map(str, nearest(length, parts)))}"
        f"{without if tp > 1 and length % sequence_parts(cp, 1) == 0 else ''}"
    )


def nearest(number: int, divisor: int) -> list[int]:
    """Return the multiples of `divisor` next to `number`, of which the lower may be missing."""
    below = number // divisor * divisor
    return [n for n in (below, below + divisor) if n > 0]


def number_problems(numbers: Mapping[str, int], tp: int) -> Iterator[str]:
    """Yield which numbers of a model, such as heads, tp does not divide, and the nearest tp."""
    near = _near_factors(math.gcd(*numbers.values()), tp)
    for name, number in numbers.items():
        if number % tp:
            yield (
                f"parallel.tp={tp} does not divide {name}={number}: use "
                f"{' or '.join(map(str, near))}"
            )


def names_module(pattern: str, name: str) -> bool:
    """Return whether a pattern of a plan, in which * stands for one part, names a module."""
    return _compiled(pattern).fullmatch(name) is not None


@functools.cache
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(re.escape(pattern).replace(r"\*", r"[^.]+"))
