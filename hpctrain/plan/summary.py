"""The first sentences of an answer: what fits where, how long it takes, and at what cost."""

import shlex
from collections.abc import Callable, Sequence
from itertools import groupby

from hpctrain.console import Console
from hpctrain.estimates.memory_fit import MARGIN
from hpctrain.hardware import Hardware, Price
from hpctrain.plan.budget import duration, number
from hpctrain.plan.predicting.estimate import Estimate, order
from hpctrain.plan.ranking import Kind
from hpctrain.units import readable


def print_summaries(
    console: Console,
    parameters: int,
    layouts: list[Estimate],
    hardware: Hardware,
    overrides: Sequence[str],
) -> None:
    """Print the first layout of each number of ranks in a sentence, and the command that takes it.

    The layouts are sorted by their ranks, and then best first; that of the command line comes
    first, and after it only what is faster on as many ranks. `overrides` are those of the user.
    """
    first = layouts[0]
    for place, (one, *_) in enumerate(by_ranks(layouts)):
        begin = ""
        if place and first.layout.named and one.layout.ranks == first.layout.ranks:
            if first.fits and order(first) <= order(one):
                continue
            begin = "faster: " if first.fits and first.time else "instead: "
        sentence, *others = _sentences(parameters, one, hardware)
        for line in (*[""] * bool(place), begin + sentence, *others):
            console.print(line)
        if one.fits is not False:  # a command has no line breaks, so that it can be copied
            console.print(f"  {command_of(overrides, one.overrides)}", soft_wrap=True)


def command_of(overrides: Sequence[str], others: Sequence[str]) -> str:
    """Return the command that submits the run; `others` replace values of the same keys."""
    names = {text.partition("=")[0] for text in others}
    kept = [text for text in overrides if text.lstrip("+").partition("=")[0] not in names]
    return shlex.join(["python", "-m", "hpctrain", "-m", *kept, *others])


def print_first_kind(console: Console, parameters: int, rows: list[Kind]) -> None:
    """Print the first of all known hardware in a sentence, if one is enough."""
    hardware, one = rows[0] if rows else (None, None)
    if hardware is None or one is None:
        return
    currencies = {each.price.currency for _, each in rows if each and each.price}
    cheapest = one.price and one.time and len(currencies) == 1
    which = "the cheapest" if cheapest else "that of the fewest GPUs"
    sentence, *_ = _sentences(parameters, one, hardware)
    console.print(f"of all known hardware {which}: {sentence}")


def needs(parameters: int, one: Estimate, most: float) -> str:
    """Return the memory of a layout; `most` is that of the largest GPU that is known."""
    layout, needed = one.layout, readable(one.memory.total)
    kind = "" if layout.kind == "single" else f" as {layout.kind}"
    if layout.ranks == 1 and one.memory.total > most:
        return f"one GPU alone would need {needed}, more than any has"
    where = f"each of {layout.ranks} ranks" if layout.ranks > 1 else "one rank"
    return f"{big(parameters)} parameters need {needed} on {where}{kind}"


def by_ranks(layouts: list[Estimate]) -> list[list[Estimate]]:
    """Return the layouts of each number of ranks; that of the command line is apart."""
    groups = groupby(layouts, lambda one: (one.layout.named, one.layout.ranks))
    return [list(alike) for _, alike in groups]


def trained(one: Estimate) -> str:
    """Return the tokens of the budget, or the samples if these have no tokens."""
    return big((one.steps or 0) * one.layout.batch.global_size * max(1, one.tokens))


def costs(price: Price | None, spot: Price | None, amount: Callable[[Price], str]) -> list[str]:
    """Return amounts at the price that counts and at that of spot capacity, where known."""
    prices = dict.fromkeys(each for each in (price, spot) if each is not None)
    return [f"{amount(each)} {each.currency} {each.kind.replace('_', ' ')}" for each in prices]


def big(value: float, letters: Sequence[str] = ("", "k", "M", "B", "T")) -> str:
    """Return a number with three digits and a letter for thousands, millions and so on: 8.03B."""
    power = next((n for n in range(len(letters)) if value < 999.5 * 1000**n), len(letters) - 1)
    return f"{value / 1000**power:.3g}{letters[power]}"


def _sentences(parameters: int, one: Estimate, hardware: Hardware) -> list[str]:
    """Return the sentences about a layout: what it is and takes, what fails, and the reason."""
    size, layout = f"{big(parameters)} parameters", one.layout
    kind = "" if layout.kind == "single" else f" as {layout.kind}"
    needed = readable(one.memory.total)
    # What has no GPU of its own is a CPU, or described by its user.
    where = f"{layout.ranks} {'' if hardware.devices else 'ranks of '}{hardware.title}{kind}"
    limit = "unknown" if hardware.memory_bytes is None else readable(hardware.memory_bytes)
    why = f"{layout.kind}: {one.reason}"
    if one.fits is False:
        return [f"{size} do not fit on {where}: the run {one.fit.reason}", why]
    each = " each" if layout.ranks > 1 else ""
    found = f"{size} fit on {where} ({needed} of {limit}{each}, {MARGIN:.0%} or more stays free)"
    if one.fit.tight:
        found = f"{size} fit barely on {where}: it is tight, as the run {one.fit.reason}"
    if one.fits is None:
        least = "at least " if one.memory.activations is None else ""
        found = f"whether {size} fit on {where} is unknown: each needs {least}{needed} of {limit}"
    losses = [] if one.losses is None else [one.losses.text]
    return [f"{found}; {_taken(one)}", *losses, why]


def _taken(one: Estimate) -> str:
    """Return what the budget takes."""
    text, budget = one.budget.text, one.budget
    if one.time is None:
        return "how long a step takes is unknown"
    if one.hours is None:
        step = duration(one.time.step_s / 3600)
        return f"a step takes {step}, and --budget 1e9tokens or 20epochs tells hours and cost"
    parts = [duration(one.hours), f"{number(one.gpu_hours)} GPU-hours"]
    parts += [f"{number(one.kwh)} kWh"] if one.kwh is not None else []
    prices = costs(one.price, one.spot, lambda price: number(one.cost(price)))
    parts += [f"about {' or '.join(prices)}"] if prices else []
    if budget.is_time:
        what = f"{trained(one)} {'tokens' if one.tokens else 'samples'}"
        return f"{text} give {one.steps:,} steps ({what}) in {', '.join(parts)}"
    what = f"{one.steps:,} steps ({text})" if text.startswith("train.") else text
    return f"{what} take {', '.join(parts)}"
