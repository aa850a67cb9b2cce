"""The answer as tables for a reader."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from hpctrain.config.advice import HOST_GB_PER_GPU
from hpctrain.console import Console, Table
from hpctrain.estimates.memory_fit import MARGIN
from hpctrain.hardware import Hardware, Price
from hpctrain.plan.budget import number
from hpctrain.plan.inspecting.model_facts import Layer, ModelFacts
from hpctrain.plan.predicting.estimate import Estimate
from hpctrain.plan.ranking import Scaled
from hpctrain.units import MIB, readable


def print_model(console: Console, facts: ModelFacts) -> None:
    """Print the sizes of the model."""
    others = [f"{facts.trainable:,} trained", f"{facts.embedding:,} in embeddings"]
    if facts.active != facts.parameters:
        others.append(f"{facts.active:,} used by a token")
    console.print(f"model: {facts.parameters:,} parameters ({', '.join(others)})")
    if facts.flops is None:
        console.print("FLOPs: unknown, the model can be called only with values")
        return
    flops = facts.flops
    text = f"FLOPs of a sample: {_si(flops.forward)} forward, {_si(flops.training)} in training"
    if flops.tokens:
        text += f"; {_si(flops.training / flops.tokens)} for each of its {flops.tokens:,} tokens"
    console.print(f"{text} ({flops.convention})")


def print_layers(console: Console, layers: list[Layer]) -> None:
    """Print the table of layers."""
    table = Table("layer", "class", "shape", "parameters", "FLOPs", "activations")
    for layer in layers:
        table.add_row(
            layer.name,
            layer.kind,
            "x".join(map(str, layer.shape)),
            f"{layer.parameters:,}",
            "?" if layer.flops is None else _si(layer.flops),
            "?" if layer.activations is None else f"{layer.activations / MIB:.3f} MiB",
        )
    console.print(table)


def print_memory(
    console: Console, estimate: Estimate, hardware: Hardware | None, most: float
) -> None:
    """Print the memory of a layout by part; `most` is that of the largest GPU that is known."""
    layout = estimate.layout
    batch = layout.batch
    if hardware is None and layout.ranks == 1 and estimate.memory.total > most:
        console.print(
            f"\none GPU alone would need {readable(estimate.memory.total)}, more than any has; "
            "hardware=NAME shows layouts that fit"
        )
        return
    console.print(
        f"\n{layout.kind} on {layout.ranks} rank{'s' * (layout.ranks > 1)}: global batch "
        f"{batch.global_size} = dp {batch.shares} x accumulate {batch.accumulate} x {batch.micro}"
    )
    table = Table("memory of the rank that needs most", "")
    host = estimate.memory.host
    for name, value in vars(estimate.memory).items():
        if name != "host" or host:
            away = host and name in ("parameters", "gradients", "optimizer")
            text = "unknown" if value is None else readable(value)
            table.add_row(f"{name} (host)" if away else name, text)
    console.print(table)
    if estimate.memory.activations is None:
        console.print("the activations are unknown, so the total is at least this")
    if host:
        number = layout.config.launch.tasks_per_node
        console.print(
            f"each node keeps {readable(number * host)} of {number} ranks in its host "
            f"memory, and needs {HOST_GB_PER_GPU} GB for each rank beside it (launch.mem_gb)"
        )
    if hardware is None:
        return
    if estimate.fits is None:
        console.print(f"whether it fits into {hardware.title} is unknown")
        return
    text = f"fits into {hardware.title}: {MARGIN:.0%} or more of its memory stays free"
    if estimate.room:
        verdict = "is tight" if estimate.fits else "does not fit"
        text = f"{verdict} on {hardware.title}: it {estimate.room}"
    console.print(f"it {text}")


def print_layouts(
    console: Console, estimates: list[Estimate], hardware: Hardware, command: str
) -> None:
    """Print the layouts, best first, and after `command` the overrides of each."""
    prices = [
        f"{price.amount:g} {price.currency} {price.kind.replace('_', ' ')}"
        for price in (hardware.price_per_hour, hardware.spot)
        if price is not None
    ]
    date = f", {hardware.price_per_hour.date or 'no date'}" if hardware.price_per_hour else ""
    told = f"; a GPU-hour: {', '.join(dict.fromkeys(prices))}{date}" if prices else ""
    console.print(f"\nestimates on {hardware.title}{told}")
    columns: dict[str, Callable[[Estimate], str]] = {
        "layout": _name,
        "ranks": lambda one: str(one.layout.ranks),
        "memory": _memory,
        "step": lambda one: _or_unknown(one.time and one.time.step_s, "{:.3f} s"),
        "tok/s/GPU": lambda one: _or_unknown(one.tokens_per_s_per_gpu, "{:,.0f}"),
        "MFU": lambda one: _or_unknown(one.time and one.time.mfu, "{:.1%}"),
        "hours": lambda one: number(one.hours),
        "cost": lambda one: number(one.cost(one.price)),
        "spot": lambda one: number(one.cost(one.spot)),
    }
    texts = {name: [cell(one) for one in estimates] for name, cell in columns.items()}
    shown = {name: column for name, column in texts.items() if {*column} != {"unknown"}}
    _print_table(console, shown, keys=2)
    ranks: set[int] = set()
    for estimate in estimates:
        if estimate.layout.ranks in ranks:  # the first of each number of ranks is the fastest
            continue
        ranks.add(estimate.layout.ranks)
        name = f"{_name(estimate)}, {estimate.layout.ranks}: {estimate.reason}"
        console.print(f"\n{name}{_bill(estimate)}")
        # A command has no line breaks, so that it can be copied.
        console.print(f"  {' '.join([command, *estimate.layout.overrides])}", soft_wrap=True)


def _name(estimate: Estimate) -> str:
    """Return the kind of a layout; two of one kind are on the same ranks only if one was given."""
    return estimate.layout.kind + ", as given" * estimate.layout.named


def _print_table(console: Console, columns: Mapping[str, list[str]], keys: int = 1) -> None:
    table = Table(*columns, right=range(1, len(columns)), keys=keys)
    for row in zip(*columns.values(), strict=True):
        table.add_row(*row)
    console.print(table)


def _bill(estimate: Estimate) -> str:
    """Return what the budget takes on this layout; "" without a budget."""
    entry = estimate.as_json()
    if estimate.hours is None:
        return ""
    parts = [f"{number(estimate.hours)} hours", f"{number(entry['gpu_hours'])} GPU-hours"]
    parts += [f"{number(entry['kwh'])} kWh"] if entry["kwh"] is not None else []
    parts += [_money(estimate, estimate.price)] if estimate.price else []
    parts += [f"spot {_money(estimate, estimate.spot)}"] if estimate.spot else []
    return f". It takes {', '.join(parts)}"


def _money(estimate: Estimate, price: Price | None, *, unit: bool = True) -> str:
    currency = f" {price.currency}" if price and unit else ""
    return f"{number(estimate.cost(price))}{currency}"


def print_excluded(console: Console, excluded: Mapping[str, str]) -> None:
    """Print what is not possible, each layout once, on the most ranks; one line for a reason."""
    last = {name.partition(" ")[0]: name for name in excluded}
    names: dict[str, list[str]] = {}
    for name in last.values():
        names.setdefault(excluded[name], []).append(name)
    for reason, alike in names.items():
        layouts = [name.partition(" ")[0] for name in alike[:-1]]
        console.print(f"excluded: {', '.join([*layouts, alike[-1]])}: {reason}")


def print_scaling(console: Console, rows: list[Scaled]) -> None:
    """Print what more nodes give, if there are several numbers of them."""
    if not rows:
        return
    console.print("\nscaling with the same global batch, the fastest layout of each")
    entries = [row.as_json() for row in rows]
    columns = {
        "nodes": [str(entry["nodes"]) for entry in entries],
        "ranks": [str(entry["ranks"]) for entry in entries],
        "layout": [row.estimate.layout.kind for row in rows],
        "step": [_or_unknown(entry["step_s"], "{:.3f} s") for entry in entries],
        "hours": [number(row.estimate.hours) for row in rows],
        "cost": [number(row.estimate.cost(row.estimate.price)) for row in rows],
        "efficiency": [f"{row.efficiency:.1%}" for row in rows],
    }
    _print_table(console, {n: cells for n, cells in columns.items() if {*cells} != {"unknown"}})
    best = max(rows, key=lambda row: row.efficiency)
    if best.efficiency > 1.005:
        console.print(
            f"more than 100%: {_how(best.estimate)} has room on {best.estimate.layout.ranks} GPUs, "
            f"and {_how(rows[0].estimate)} is the fastest that has room in the first row"
        )


def _how(estimate: Estimate) -> str:
    layout, train = estimate.layout, estimate.layout.config.train
    pieces = f"{layout.batch.accumulate} micro-batch{'es' * (layout.batch.accumulate > 1)}"
    return f"{layout.kind} ({pieces}, activation checkpointing {train.activation_checkpointing})"


def print_hardware(console: Console, rows: list[tuple[Hardware, Estimate | None]]) -> None:
    """Print on how many GPUs of each kind the run is possible, and what it takes there."""
    units = {one.price.currency for _, one in rows if one and one.price}
    unit = f", in {units.pop()}" if len(units) == 1 else ""
    console.print(f"\nthe smallest number of GPUs that is enough, of each kind{unit}; ? is unknown")
    columns: dict[str, list[str]] = {"hardware": [hardware.name for hardware, _ in rows]}
    cells = [
        ("-", "not possible", "", "", "", "", "", "")
        if one is None
        else (
            *(str(one.layout.ranks), one.layout.kind, number(one.hours), number(one.gpu_hours)),
            number(one.as_json()["kwh"]),
            *(_money(one, price, unit=not unit) for price in (one.price, one.spot)),
            one.price.date[:7] if one.price else "",
        )
        for _, one in rows
    ]
    names = ("GPUs", "layout", "hours", "GPU-hours", "kWh", "cost", "spot", "prices of")
    for place, name in enumerate(names):
        columns[name] = [cell[place].replace("unknown", "?") for cell in cells]
    _print_table(console, columns)


def _memory(estimate: Estimate) -> str:
    least = ">" if estimate.memory.activations is None else ""
    return f"{least}{readable(estimate.memory.total)}{' tight' * estimate.tight}"


def _or_unknown(value: Any, form: str) -> str:
    return "unknown" if value is None else form.format(value)


def _si(number: float) -> str:
    for limit, letter in ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M")):
        if number >= limit:
            return f"{number / limit:.2f} {letter}FLOP"
    return f"{number:.0f} FLOP"
