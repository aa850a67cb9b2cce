"""The first sentences of an answer: what fits where, how long it takes, and at what cost."""

from collections.abc import Callable, Sequence

from hpctrain.estimates.memory_fit import MARGIN
from hpctrain.hardware import Hardware, Price
from hpctrain.plan.budget import duration, number
from hpctrain.plan.predicting.estimate import Estimate
from hpctrain.units import readable


def needs(parameters: int, one: Estimate, most: float) -> str:
    """Return the memory of a layout; `most` is that of the largest GPU that is known."""
    layout, needed = one.layout, readable(one.memory.total)
    kind = "" if layout.kind == "single" else f" as {layout.kind}"
    if layout.ranks == 1 and one.memory.total > most:
        return f"one GPU alone would need {needed}, more than any has"
    where = f"each of {layout.ranks} ranks" if layout.ranks > 1 else "one rank"
    return f"{big(parameters)} parameters need {needed} on {where}{kind}"


def summary(parameters: int, one: Estimate, hardware: Hardware) -> list[str]:
    """Return the sentences about a layout: what it is and takes, what fails, and the reason."""
    size, layout = f"{big(parameters)} parameters", one.layout
    kind = "" if layout.kind == "single" else f" as {layout.kind}"
    needed = readable(one.memory.total)
    # What has no GPU of its own is a CPU, or described by its user.
    where = f"{layout.ranks} {'' if hardware.devices else 'ranks of '}{hardware.title}{kind}"
    limit = "unknown" if hardware.memory_bytes is None else readable(hardware.memory_bytes)
    if one.fits is False:
        return [f"{size} do not fit on {where}: the run {one.room}"]
    found = f"{size} fit on {where} ({needed} of {limit} each, {MARGIN:.0%} or more stays free)"
    if one.tight:
        found = f"{size} fit barely on {where}: it is tight, as the run {one.room}"
    if one.fits is None:
        least = "at least " if one.memory.activations is None else ""
        found = f"whether {size} fit on {where} is unknown: each needs {least}{needed} of {limit}"
    lines = [f"{found}; {_taken(one)}"]
    if one.losses is not None:
        lines.append(one.losses.text)
    return lines if layout.named else [*lines, f"{layout.kind}: {one.reason}"]


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
