"""Findings as a table for people and as JSON for programs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from hpctrain.console import Cell, Console
from hpctrain.doctor.finding import Finding, Verdict, worst

_STYLES: dict[Verdict, str] = {"pass": "green", "unknown": "dim", "warn": "yellow", "fail": "red"}


def print_findings(title: str, findings: Sequence[Finding], *, short: bool = False) -> None:
    """Print the findings of one place, and below them a sentence for each cure.

    Args:
        title: The place, such as the name of a host.
        findings: What was found there.
        short: Whether what has passed is left out.
    """
    shown = [each for each in findings if not short or each.verdict != "pass"]
    table = Table(title=title, title_justify="left")
    for column in ("check", "verdict", "found"):
        table.add_column(column)
    for each in shown:
        found = each.found + (f"; expected: {each.expected}" if each.expected else "")
        style = _STYLES[each.verdict]
        table.add_row(Cell(each.check), Cell(each.verdict, style=style), Cell(found))
    console = Console()
    if shown:
        console.print(table)
    for each in findings:
        if each.cure:
            console.print(Cell(f"{each.verdict}: {each.check}: {each.cure}"), soft_wrap=True)


# The figures of the last table, with their headings; a figure that nobody has measured is left out.
_SHOWN = {
    "matmul_tflops": "matmul TFLOP/s",
    "memory_gb_s": "memory GB/s",
    "to_gpu_gb_s": "to GPU GB/s",
    "read_mb_s": "reading MB/s",
    "all_reduce_latency_us": "latency us",
}


def print_nodes(
    places: Mapping[str, Sequence[Finding]], figures: Mapping[str, Mapping[str, float]]
) -> None:
    """Print one row for each node: the verdict, and what was measured."""
    names = {name for each in figures.values() for name in each}
    columns = {name: head for name, head in _SHOWN.items() if name in names}
    columns |= {name: _bus(name) for name in sorted(names, key=_size) if name.endswith("_bus_gb_s")}
    table = Table(title="nodes", title_justify="left")
    for head in ("node", "verdict", *columns.values()):
        table.add_column(head)
    for host, findings in places.items():
        own, verdict = figures.get(host, {}), worst(findings)
        values = (f"{own[name]:.3g}" if name in own else "" for name in columns)
        table.add_row(Cell(host), Cell(verdict, style=_STYLES[verdict]), *map(Cell, values))
    Console().print(table)


def _size(name: str) -> tuple[str, int]:
    where, _, size = name.removesuffix("_bus_gb_s").rpartition("_")
    return where, int(size) if size.isdigit() else 0


def _bus(name: str) -> str:
    where, size = _size(name)
    shown = f"{size >> 20} MiB" if size >= 1 << 20 else f"{size >> 10} KiB"
    return f"{where.replace('_', '-')} {shown} bus GB/s"


def print_json(verdict: Verdict, places: Mapping[str, Sequence[Finding]], **more: Any) -> None:
    """Print one JSON object: the verdict, the findings by place, and what else was measured."""
    hosts = {
        place: {"verdict": worst(findings), "findings": [each.facts() for each in findings]}
        for place, findings in places.items()
    }
    print(json.dumps({"verdict": verdict, "places": hosts, **more}))
