"""The answer as tables for a reader."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hpctrain.console import Console, Table
from hpctrain.hardware import Hardware
from hpctrain.plan.inspecting.model_facts import Layer, ModelFacts
from hpctrain.plan.more_nodes import Scaled
from hpctrain.plan.predicting.estimate import Estimate

_GIB = 2**30


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
            "?" if layer.activations is None else f"{layer.activations / 2**20:.3f} MiB",
        )
    console.print(table)


def print_memory(console: Console, estimate: Estimate, hardware: Hardware | None) -> None:
    """Print the memory of a layout by part."""
    layout = estimate.layout
    batch = layout.batch
    console.print(
        f"\n{layout.kind} on {layout.ranks} rank{'s' * (layout.ranks > 1)}: global batch "
        f"{batch.global_size} = dp {batch.shares} x accumulate {batch.accumulate} x {batch.micro}"
    )
    table = Table("memory of the rank that needs most", "")
    for name, value in vars(estimate.memory).items():
        table.add_row(name, "unknown" if value is None else f"{value / _GIB:.3f} GiB")
    console.print(table)
    if estimate.memory.activations is None:
        console.print("the activations are unknown, so the total is at least this")
    if hardware is None:
        return
    if hardware.memory_bytes is None or estimate.fits is None:
        console.print(f"whether it fits into {hardware.title} is unknown")
        return
    verdict = "fits into" if estimate.fits else "does not fit into"
    console.print(f"it {verdict} the {hardware.memory_bytes / _GIB:.1f} GiB of {hardware.title}")


def print_layouts(console: Console, estimates: list[Estimate], command: str) -> None:
    """Print the layouts, best first, and the command of each."""
    table = Table("layout", "ranks", "memory", "step", "tokens/s/GPU", "MFU", "hours")
    for estimate in estimates:
        entry = estimate.as_json()
        hours = entry["gpu_hours"]
        table.add_row(
            estimate.layout.kind,
            str(entry["ranks"]),
            _memory(estimate),
            _or_unknown(entry["step_s"], "{:.3f} s"),
            _or_unknown(entry["tokens_per_s_per_gpu"], "{:,.0f}"),
            _or_unknown(entry["mfu"], "{:.1%}"),
            _or_unknown(hours and hours / entry["ranks"], "{:,.1f}"),
        )
    console.print(table)
    shown: set[int] = set()
    for estimate in estimates:
        ranks = estimate.layout.ranks
        if ranks in shown:  # the first of each number of ranks is the fastest
            continue
        shown.add(ranks)
        console.print(f"\n{estimate.layout.kind}, {ranks}: {estimate.reason}")
        console.print(f"  {command} {' '.join(estimate.layout.overrides)}", soft_wrap=True)


def print_excluded(console: Console, excluded: Mapping[str, str]) -> None:
    """Print what is not possible, each layout once, on the most ranks; one line for a reason.

    Args:
        console: Where.
        excluded: The reason by `LAYOUT on N ranks`.
    """
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
    table = Table("nodes", "ranks", "layout", "step", "tokens/s/GPU", "efficiency")
    for row in rows:
        entry = row.as_json()
        table.add_row(
            str(entry["nodes"]),
            str(entry["ranks"]),
            row.estimate.layout.kind,
            _or_unknown(entry["step_s"], "{:.3f} s"),
            _or_unknown(entry["tokens_per_s_per_gpu"], "{:,.0f}"),
            f"{row.efficiency:.1%}",
        )
    console.print(table)


def print_hardware(console: Console, rows: list[tuple[Hardware, Estimate | None]]) -> None:
    """Print on how many GPUs of each kind the run fits, and what it takes there."""
    table = Table("hardware", "GPUs", "layout", "GPU-hours", "kWh", "cost", "price")
    for hardware, estimate in rows:
        if estimate is None:
            table.add_row(hardware.name, "-", "does not fit", "", "", "", "")
            continue
        entry, price = estimate.as_json(), hardware.price_per_hour
        table.add_row(
            hardware.name,
            str(estimate.layout.ranks),
            estimate.layout.kind,
            _or_unknown(entry["gpu_hours"], "{:,.1f}"),
            _or_unknown(entry["kwh"], "{:,.0f}"),
            _or_unknown(entry["cost"], "{:,.0f} " + (price.currency if price else "")),
            f"{price.amount:g} {price.currency}/h, {price.date}" if price else "unknown",
        )
    console.print(table)


def _memory(estimate: Estimate) -> str:
    least = ">" if estimate.memory.activations is None else ""
    return f"{least}{estimate.memory.total / _GIB:.1f} GiB"


def _or_unknown(value: Any, form: str) -> str:
    return "unknown" if value is None else form.format(value)


def _si(number: float) -> str:
    for limit, letter in ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M")):
        if number >= limit:
            return f"{number / limit:.2f} {letter}FLOP"
    return f"{number:.0f} FLOP"
