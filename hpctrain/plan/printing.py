"""The answer for a reader: the first sentences, and the tables below them."""

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby

from hpctrain.config.advice import HOST_GB_PER_GPU
from hpctrain.config.schema import LoRAConfig
from hpctrain.console import Console, Table
from hpctrain.plan.answer import Answer
from hpctrain.plan.budget import number
from hpctrain.plan.inspecting.model_facts import ModelFacts
from hpctrain.plan.predicting.estimator import Estimate
from hpctrain.plan.ranking import Kind, currencies, scaling
from hpctrain.plan.sentences import (
    big,
    by_ranks,
    command_of,
    costs,
    known,
    needs,
    sentences,
)
from hpctrain.units import readable

_MOST = 10  # rows of the table of layouts for each number of ranks


def show(console: Console, answer: Answer, overrides: Sequence[str]) -> None:
    """Print what a beginner asks first, then the tables, and what they rest on."""
    _print_first(console, answer, overrides)
    if answer.layouts and answer.hardware:
        _print_layouts(console, answer.layouts)
        _print_scaling(console, scaling(answer.ranking.best))
    if answer.kinds:
        _print_hardware(console, answer.kinds)
    if answer.named is not None:
        _print_memory(console, answer.named)
    console.print()
    _print_model(console, answer.estimator.facts, answer.config.train.lora)
    if answer.layouts and answer.hardware:
        console.print(answer.loader.text(answer.layouts[0]))
    _print_excluded(console, answer.ranking.excluded)
    console.print("\nassumptions")
    for name, text in answer.assumptions.items():
        console.print(f"  {name}: {text}", soft_wrap=True)


def _print_first(console: Console, answer: Answer, overrides: Sequence[str]) -> None:
    """Print the sentences, and the commands that take the layouts."""
    size = f"{big(answer.estimator.facts.parameters)} parameters"
    named, hardware, layouts, kinds = answer.named, answer.hardware, answer.layouts, answer.kinds
    if hardware is None and named is not None:
        most = max((kind.hardware.memory_bytes or 0 for kind in kinds), default=math.inf)
        console.print(f"{needs(size, named, most)}; hardware=NAME shows layouts that fit")
    elif hardware is not None and layouts:
        _print_summaries(console, size, layouts, overrides)
    elif hardware is not None:
        console.print(f"no layout of {size} on {hardware.title} is possible")
    if one := kinds[0].best if kinds else None:
        cheapest = one.price and one.time and len(currencies(kinds)) == 1
        which = "the cheapest" if cheapest else "that of the fewest GPUs"
        gpus = "no published run covers" if one.assumed else "published runs cover"
        console.print(f"of the hardware that {gpus} {which}: {sentences(size, one)[0]}")


def _print_summaries(
    console: Console, size: str, layouts: list[Estimate], overrides: Sequence[str]
) -> None:
    """Print the first layout of each number of ranks in a sentence, and the command that takes it.

    After that of the command line comes only what is faster on as many ranks.
    """
    first = layouts[0]
    for place, (one, *_) in enumerate(by_ranks(layouts)):
        begin = ""
        if place and first.layout.named and one.layout.ranks == first.layout.ranks:
            if first.fits and first.order <= one.order:
                continue
            begin = "faster: " if first.fits and first.time else "instead: "
        sentence, *others = sentences(size, one)
        for line in (*[""] * bool(place), begin + sentence, *others):
            console.print(line)
        if one.fits is not False:  # a command has no line breaks, so that it can be copied
            console.print(f"  {command_of(overrides, one.layout.overrides)}", soft_wrap=True)


def _print_model(console: Console, facts: ModelFacts, lora: LoRAConfig) -> None:
    """Print the sizes of the model."""
    others = [f"{facts.trainable:,} trained", f"{facts.embedding:,} in embeddings"]
    if lora.quantize:
        others.append(f"{facts.adapted:,} packed in 4 bits, those of train.lora.match")
    if facts.active != facts.parameters:
        others.append(f"{facts.active:,} used by a token")
    console.print(f"model: {facts.parameters:,} parameters ({', '.join(others)})")
    if (flops := facts.flops) is None:
        console.print("FLOPs: unknown, the model can be called only with values")
        return
    text = f"FLOPs of a sample: {_si(flops.forward)} forward, {_si(flops.training)} in training"
    if flops.tokens:
        text += f"; {_si(flops.training / flops.tokens)} for each of its {flops.tokens:,} tokens"
    console.print(f"{text} ({flops.convention})")


def _print_memory(console: Console, estimate: Estimate) -> None:
    """Print the memory of a layout by part."""
    layout, batch, memory = estimate.layout, estimate.layout.batch, estimate.memory
    console.print(
        f"\n{layout.label}: global batch {batch.global_size} = dp {batch.shares} x accumulate "
        f"{batch.accumulate} x {batch.micro}"
    )
    table = Table("memory of the rank that needs most", "")
    for name, value in vars(memory).items():
        if name != "host" or memory.host:
            away = memory.host and name in ("parameters", "gradients", "optimizer")
            table.add_row(name + " (host)" * bool(away), known(value))
    console.print(table)
    if memory.activations is None:
        console.print("the activations are unknown, so the total is at least this")
    if memory.host:
        ranks = layout.config.launch.tasks_per_node
        console.print(
            f"each node keeps {readable(estimate.host_of_node)} of {ranks} ranks in its host "
            f"memory, and needs {HOST_GB_PER_GPU} GiB for each rank beside it (launch.mem_gb)"
        )
    if estimate.staged:
        console.print(
            f"each node copies {readable(estimate.staged)} into its host memory for a checkpoint "
            "that is written while the training goes on"
        )


def _print_layouts(console: Console, estimates: list[Estimate]) -> None:
    """Print the best layouts of each number of ranks."""
    first = estimates[0]
    amounts, price = costs(first, lambda each: f"{each.amount:g}"), first.price
    told = f"; a GPU-hour: {', '.join(amounts)}, {price.date or 'no date'}" if price else ""
    console.print(f"\nestimates on {first.hardware.title}{told}")
    shown = [one for alike in by_ranks(estimates) for one in alike[:_MOST]]
    _print_estimates(console, shown, [name for name in _CELLS if name != "nodes"])
    if more := len(estimates) - len(shown):
        console.print(f"{more} slower layout{'s' * (more > 1)}: --json lists them")


def _print_excluded(console: Console, excluded: Mapping[str, str]) -> None:
    """Print what is not possible, each layout once, on the most ranks; one line for a reason."""
    names: dict[str, list[str]] = {}
    for name in {name.partition(" ")[0]: name for name in excluded}.values():
        names.setdefault(excluded[name], []).append(name)
    for reason, (*others, last) in names.items():
        layouts = [*(name.partition(" ")[0] for name in others), last]
        console.print(f"excluded: {', '.join(layouts)}: {reason}")


def _print_scaling(console: Console, rows: list[tuple[Estimate, float]]) -> None:
    """Print what more nodes give, if there are several numbers of them."""
    if not rows:
        return
    console.print("\nscaling with the same global batch, the fastest layout of each")
    after = {"efficiency": [f"{part:.1%}" for _, part in rows]}
    names = ("nodes", "ranks", "layout", "step", "hours", "cost")
    _print_estimates(console, [one for one, _ in rows], names, after=after)


def _print_hardware(console: Console, rows: list[Kind]) -> None:
    """Print on how many GPUs of each kind the run is possible, and what it takes there."""
    units, found = currencies(rows), [kind.best for kind in rows]
    unit = f", in {min(units)}" if len(units) == 1 else ""
    console.print(f"\nthe smallest number of GPUs that is enough, of each kind{unit}")
    before = {
        "hardware": [
            kind.hardware.name + " *" * bool(kind.best and kind.best.assumed) for kind in rows
        ],
        "GPUs": [str(one.layout.ranks) if one else "-" for one in found],
        "layout": [_name(one) if one else "not possible" for one in found],
    }
    prices = [one and one.price for one in found]
    dates = [f"{'' if unit else price.currency} {price.date}" if price else "" for price in prices]
    after = {"prices of": [date.strip() for date in dates]}
    names = ("hours", "GPU-hours", "kWh", "cost", "spot")
    _print_estimates(console, found, names, before, after)
    for why, alike in groupby((kind for kind in rows if not kind.best), lambda kind: kind.why):
        those = ", ".join(kind.hardware.name for kind in alike)
        console.print(f"not possible on {those}: {why}", soft_wrap=True)


def _print_estimates(
    console: Console,
    rows: Sequence[Estimate | None],
    names: Sequence[str],
    before: Mapping[str, list[str]] = {},
    after: Mapping[str, list[str]] = {},
) -> None:
    """Print a table; a column of which nothing is known is left out."""
    cells = {name: ["" if one is None else _CELLS[name](one) for one in rows] for name in names}
    columns = {n: c for n, c in {**before, **cells, **after}.items() if {*c} - {"", "unknown"}}
    table = Table(*columns, right=range(1, len(columns)))
    for row in zip(*columns.values(), strict=True):
        table.add_row(*row)
    console.print(table)


def _name(one: Estimate) -> str:
    """Return the name of a layout, with a mark if it was compared with nothing."""
    return one.layout.name + " *" * bool(one.uncompared)


def _step(one: Estimate) -> str:
    if one.time is None:
        return "unknown"
    seconds = one.time.step_s
    return f"{seconds:.3f} s" if seconds >= 0.1 else f"{1000 * seconds:.3g} ms"


_CELLS: dict[str, Callable[[Estimate], str]] = {
    "layout": _name,
    "nodes": lambda one: str(one.layout.nodes),
    "ranks": lambda one: str(one.layout.ranks),
    "memory": lambda one: (
        f"{'>' * (one.memory.activations is None)}{readable(one.memory.total)}"
        f"{' tight' * one.fit.tight}{' does not fit' * (one.fits is False)}"
    ),
    "host of a node": lambda one: readable(one.host_of_node) if one.host_of_node else "",
    "step": _step,
    "tok/s/GPU": lambda one: f"{rate:,.0f}" if (rate := one.tokens_per_s_per_gpu) else "unknown",
    "MFU": lambda one: f"{one.time.mfu:.1%}" if one.time else "unknown",
    "hours": lambda one: number(one.hours),
    "GPU-hours": lambda one: number(one.gpu_hours),
    "kWh": lambda one: number(one.kwh),
    "cost": lambda one: number(one.cost(one.price)),
    "spot": lambda one: number(one.cost(one.hardware.spot)),
}


def _si(number: float) -> str:
    return f"{big(number, (' ', ' k', ' M', ' G', ' T', ' P', ' E'))}FLOP"
