"""What was found and measured, for people and as JSON for programs."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict

from hpctrain.base.terminal.console import Cell, Console, Table
from hpctrain.insight.doctor.finding import Finding, Result, worst

_STYLES: dict[Result, str] = {"pass": "green", "unknown": "dim", "warn": "yellow", "fail": "red"}
# The columns of the table of nodes.
_FIGURES = {
    "matmul TFLOP/s": "matmul_tflops",
    "memory GB/s": "memory_gb_s",
    "to GPU GB/s": "to_gpu_gb_s",
    "in node GB/s": "all_reduce_in_node_bus_gb_s",
    "all-reduce GB/s": "all_reduce_bus_gb_s",
    "latency us": "all_reduce_latency_us",
}

Places = Mapping[str, Sequence[Finding]]
Figures = Mapping[str, Mapping[str, float]]


def show(places: Places, figures: Figures) -> None:
    """Print what was found, each cure once; with figures, only what is not well on each node."""
    shown = {
        host: [one for one in found if not figures or one.result in ("warn", "fail")]
        for host, found in places.items()
    }
    for host, findings in shown.items():
        if not findings:
            continue
        table = Table("check", "verdict", "found", title=f"{host}: {worst(places[host])}")
        for one in findings:
            found = one.found + f"; expected: {one.expected}" * bool(one.expected)
            table.add_row(one.check, Cell(one.result, _STYLES[one.result]), found)
        Console().print(table)
    cures = (one for findings in shown.values() for one in findings if one.cure)
    lines = [*dict.fromkeys(f"{one.result}: {one.check}: {one.cure}" for one in cures)]
    every = [one for findings in places.values() for one in findings if figures]
    if lacking := dict.fromkeys(one.check for one in every if one.result == "unknown"):
        lines.append(f"unknown (--json says why): {', '.join(lacking)}")
    for line in lines:
        Console().print(Cell(line), soft_wrap=True)
    if figures:
        _show_figures(places, figures)


def _show_figures(places: Places, figures: Figures) -> None:
    table = Table("node", "verdict", *_FIGURES, title="nodes", right=range(2, 8))
    for host, findings in places.items():
        result, own = worst(findings), figures.get(host, {})
        cells = (f"{own[name]:,.4g}" if name in own else "" for name in _FIGURES.values())
        table.add_row(host, Cell(result, _STYLES[result]), *cells)
    Console().print(table)


def print_json(result: Result, places: Places, figures: Figures) -> None:
    """Print one JSON object: the result, the findings by place, and what was measured."""
    hosts = {
        place: {"verdict": worst(findings), "findings": [*map(_facts, findings)]}
        for place, findings in places.items()
    }
    print(json.dumps({"verdict": result, "places": hosts, "figures": figures}))


def _facts(finding: Finding) -> dict[str, str]:
    """Return what programs read of a finding, in which its result is the `verdict`."""
    return {"verdict" if key == "result" else key: text for key, text in asdict(finding).items()}
