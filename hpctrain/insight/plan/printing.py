"""The answer for a reader: a sentence and a command first, then what `--json` has, as tables."""

import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby, islice
from operator import itemgetter
from typing import Any

from rich.text import Text

from hpctrain.base.terminal.console import Console, Table
from hpctrain.base.units import duration, readable
from hpctrain.insight.plan.answer import Answer
from hpctrain.insight.plan.budget import number
from hpctrain.insight.plan.predicting.estimator import Estimate

_MOST = 10  # rows of the table of layouts for each number of ranks
# The names of columns, with what makes their cells of the facts of a layout.
_Columns = Mapping[str, Callable[[Mapping[str, Any]], str]]


def show(
    console: Console, answer: Answer, facts: Mapping[str, Any], overrides: Sequence[str]
) -> None:
    """Print what a beginner asks first, then the tables, and what they rest on."""
    for line in _first(answer, overrides):
        console.print(line, soft_wrap=True)
    if layouts := facts["layouts"]:
        if (hardware := answer.asked.hardware) is not None:
            of_ranks = groupby(layouts, itemgetter("ranks"))
            rows = [one for _, alike in of_ranks for one in islice(alike, _MOST)]
            _print_rows(console, f"estimates on {hardware.title}; --json has all", rows, _ALL)
        parts = {name: _bytes(value) for name, value in layouts[0]["memory"].items()}
        _print_facts(console, f"memory of a rank, {layouts[0]['layout']}", parts)
    if kinds := facts["hardware"]:
        what = "the smallest number of GPUs that is enough, of each kind, the cheapest first"
        _print_rows(console, what, [one for one in kinds if one["fits"] is not False], _OF_KINDS)
        for one in kinds:
            if one["fits"] is False:
                console.print(f"not possible on {one['name']}: {one['reason']}", soft_wrap=True)
    excluded, found = facts["assumptions"]["excluded"], facts["assumptions"]
    _print_facts(console, "model", facts["model"])
    # One line for a kind, that on the most ranks.
    _print_facts(console, "excluded", {name.partition(" ")[0]: excluded[name] for name in excluded})
    _print_facts(console, "assumptions", {n: found[n] for n in found if n != "excluded"})
    for text in facts["warnings"]:
        console.print(Text(f"warning: {text}", "yellow"))


def _command_of(overrides: Sequence[str], others: Sequence[str]) -> str:
    """Return the command that submits the run; `others` replace values of the same keys."""
    names = {text.partition("=")[0] for text in others}
    kept = [text for text in overrides if text.lstrip("+").partition("=")[0] not in names]
    return shlex.join(["python", "-m", "hpctrain", "-m", *kept, *others])


def _first(answer: Answer, overrides: Sequence[str]) -> Iterator[str]:
    """Yield the sentence of the first layout of each number of ranks, and the command it takes.

    After that of the command line comes only what is faster on as many ranks.
    """
    size = f"{_big(answer.estimator.facts.parameters)} parameters"
    named, hardware, layouts = answer.named, answer.asked.hardware, answer.layouts
    if hardware is None and named is not None:
        needed = f"{readable(named.memory.total)} on each rank as {named.layout.label}"
        yield f"{size} need {needed}; hardware=NAME shows layouts that fit"
    elif not layouts:
        yield f"no layout of {size} on {hardware and hardware.title} is possible"
    elif hardware is not None:
        ranks = groupby(layouts, lambda one: (one.layout.named, one.layout.ranks))
        for one in (next(alike) for _, alike in ranks):
            begin = ""
            if named is not None and one is not named and one.layout.ranks == named.layout.ranks:
                if named.fits and named.order <= one.order:
                    continue
                begin = "faster: " if named.fits and named.time else "instead: "
            yield f"{begin}{_sentence(size, one)}"
            if one.fits is not False:  # a command has no line breaks, so that it can be copied
                yield f"  {_command_of(overrides, one.layout.overrides)}"
    if first := answer.kinds[0].best if answer.kinds else None:
        yield f"the first of the known GPUs: {_sentence(size, first)}"


def _sentence(size: str, one: Estimate) -> str:
    """Return what a layout is, whether it fits, and what the budget takes."""
    fits = {True: "fit", False: "do not fit", None: "may fit"}[one.fits]
    there = f"{one.layout.ranks} x {one.hardware.title} as {one.layout.kind}"
    limit = one.hardware.memory_bytes
    room = f"needs {readable(one.memory.total)} of {_bytes(limit)} per GPU"
    found = f"{size} {fits}{' barely' * one.fit.tight} on {there}: each {one.fit.reason or room}"
    if one.time is None:
        return f"{found}; how long a step takes is unknown"
    bill = one.bill
    if bill["hours"] is None:
        return f"{found}; a step takes {number(one.time.step_s)} s (--budget tells hours and cost)"
    parts = [duration(3600 * bill["hours"]), f"{number(bill['gpu_hours'])} GPU-hours"]
    if bill["currency"]:
        parts.append(f"about {number(bill['cost'])} {bill['currency']}")
    return f"{found}; {one.budget.text} take {', '.join(parts)}"


def _print_rows(
    console: Console, title: str, rows: Sequence[Mapping[str, Any]], columns: _Columns
) -> None:
    """Print a table of facts; a column of which nothing is known is left out."""
    cells = {name: [cell(row) for row in rows] for name, cell in columns.items()}
    known = {name: column for name, column in cells.items() if {*column} - {"", "unknown"}}
    table = Table(*known, right=range(1, len(known)))
    for row in zip(*known.values(), strict=True):
        table.add_row(*row)
    console.print(f"\n{title}")
    console.print(table)


def _seconds(value: float | None) -> str:
    """Return the time of a step for a reader."""
    if value is None:
        return "unknown"
    return f"{value:.3f} s" if value >= 0.1 else f"{1000 * value:.3g} ms"


def _layout_of(one: Mapping[str, Any]) -> str:
    """Return the name of a layout, with a mark if it was compared with nothing."""
    return f"{one['layout']}{'' if one['compared'] else ' *'}"


def _print_facts(console: Console, title: str, facts: Mapping[str, Any]) -> None:
    console.print(f"\n{title}")
    for name, value in facts.items():
        shown = f"{value:,}" if isinstance(value, int) and value is not True else value
        shown = number(value) if isinstance(value, float) or value is None else shown
        console.print(f"  {name}: {shown}", soft_wrap=True)


def _memory(one: Mapping[str, Any]) -> str:
    least, memory = one["memory"]["activations"] is None, one["memory"]
    word = " does not fit" if one["fits"] is False else " tight" * one["tight"]
    return f"{'>' * least}{readable(memory['total'])}{word}"


def _host(one: Mapping[str, Any]) -> str:
    kept = one["memory"]["host"] * one["ranks"] // one["nodes"]
    return readable(kept) if kept else ""


_LAYOUT: _Columns = {"layout": _layout_of, "ranks": lambda one: str(one["ranks"])}
_BILL: _Columns = {
    "hours": lambda one: number(one["hours"]),
    "GPU-hours": lambda one: number(one["gpu_hours"]),
    "kWh": lambda one: number(one["kwh"]),
    "cost": lambda one: number(one["cost"]),
    "spot": lambda one: number(one["spot_cost"]),
    "in": lambda one: one["currency"] or "",
}
_ALL: _Columns = {
    **_LAYOUT,
    "memory": _memory,
    "host of a node": _host,
    "step": lambda one: _seconds(one["step_s"]),
    "tok/s/GPU": lambda one: number(one["tokens_per_s_per_gpu"]),
    "MFU": lambda one: "unknown" if one["mfu"] is None else f"{one['mfu']:.1%}",
    **_BILL,
}
_OF_KINDS: _Columns = {
    "hardware": lambda one: one["name"] + " *" * (not one["gpu_compared"]),
    **_LAYOUT,
    **_BILL,
}


def _bytes(value: float | None) -> str:
    return "unknown" if value is None else readable(value)


def _big(value: float) -> str:
    """Return a number with three digits and a letter for thousands, millions and so on: 8.03B."""
    power = next((n for n in range(5) if value < 999.5 * 1000**n), 4)
    return f"{value / 1000**power:.3g}{('', 'k', 'M', 'B', 'T')[power]}"
