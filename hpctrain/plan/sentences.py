"""The answer in sentences: what a layout is, what it takes, and the command that submits it."""

import shlex
from collections.abc import Callable, Sequence
from itertools import groupby

from hpctrain.estimates.memory_fit import margin_of
from hpctrain.hardware import Price
from hpctrain.plan.budget import number
from hpctrain.plan.predicting.estimator import Estimate
from hpctrain.units import duration, readable


def command_of(overrides: Sequence[str], others: Sequence[str]) -> str:
    """Return the command that submits the run; `others` replace values of the same keys."""
    names = {text.partition("=")[0] for text in others}
    kept = [text for text in overrides if text.lstrip("+").partition("=")[0] not in names]
    return shlex.join(["python", "-m", "hpctrain", "-m", *kept, *others])


def needs(size: str, one: Estimate, most: float) -> str:
    """Return the memory of a layout; `most` is that of the largest GPU that is known."""
    ranks, needed = one.layout.ranks, readable(one.memory.total)
    if ranks == 1 and one.memory.total > most:
        return f"one GPU alone would need {needed}, more than any has"
    where = f"each of {ranks} ranks" if ranks > 1 else "one rank"
    return f"{size} need {needed} on {where}{_divided(one)}"


def by_ranks(layouts: list[Estimate]) -> list[list[Estimate]]:
    """Return the layouts of each number of ranks; that of the command line is apart."""
    groups = groupby(layouts, lambda one: (one.layout.named, one.layout.ranks))
    return [list(alike) for _, alike in groups]


def costs(one: Estimate, amount: Callable[[Price], str]) -> list[str]:
    """Return amounts at the price that counts and at that of spot capacity, where known."""
    prices = dict.fromkeys(filter(None, (one.price, one.hardware.spot)))
    return [f"{amount(each)} {each.currency} {each.kind.replace('_', ' ')}" for each in prices]


def big(value: float, letters: Sequence[str] = ("", "k", "M", "B", "T")) -> str:
    """Return a number with three digits and a letter for thousands, millions and so on: 8.03B."""
    power = next((n for n in range(len(letters)) if value < 999.5 * 1000**n), len(letters) - 1)
    return f"{value / 1000**power:.3g}{letters[power]}"


def known(nbytes: float | None) -> str:
    """Return bytes for a reader, where they are known."""
    return "unknown" if nbytes is None else readable(nbytes)


def _divided(one: Estimate) -> str:
    return "" if one.layout.kind == "single" else f" as {one.layout.kind}"


def sentences(size: str, one: Estimate) -> list[str]:
    """Return the sentences about a layout: what it is and takes, what fails, and the reason."""
    layout, hardware = one.layout, one.hardware
    needed, limit = readable(one.memory.total), known(hardware.memory_bytes)
    # What has no GPU of its own is a CPU, or described by its user.
    gpus = f"{layout.ranks} {'' if hardware.devices else 'ranks of '}{hardware.title}"
    where, why = gpus + _divided(one), f"{layout.kind}: {one.reason}"
    if one.fits is False:
        return [f"{size} do not fit on {where}: the run {one.fit.reason}", why]
    if one.fits is None:
        least = "at least " * (one.memory.activations is None)
        found = f"whether {size} fit on {where} is unknown: each needs {least}{needed} of {limit}"
    elif one.fit.tight:
        found = f"{size} fit barely on {where}: it is tight, as the run {one.fit.reason}"
    else:
        margin = f"{margin_of(layout.config.train):.0%} or more stays free"
        room = f"{needed} of {limit}{' each' * (layout.ranks > 1)}, {margin}"
        host = f", and {readable(one.host_of_node)} of the host memory of each node"
        found = f"{size} fit on {where} ({room}{host * bool(one.host_of_node)})"
    return [f"{found}; {_taken(one)}", why]


def _taken(one: Estimate) -> str:
    """Return what the budget takes."""
    steps, text = one.budget
    if one.time is None:
        return "how long a step takes is unknown"
    if one.hours is None:
        step = number(one.time.step_s)
        return f"a step takes {step} s, and --budget 1e9tokens or 20epochs tells hours and cost"
    parts = [duration(3600 * one.hours), f"{number(one.gpu_hours)} GPU-hours"]
    parts += [f"{number(one.kwh)} kWh"] if one.kwh is not None else []
    if prices := costs(one, lambda price: number(one.cost(price))):
        parts.append(f"about {' or '.join(prices)}")
    what = f"{steps:,} steps ({text})" if text.startswith("train.") else text
    return f"{what} take {', '.join(parts)}"
