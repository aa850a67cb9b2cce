"""Findings and figures as tables for people, which fit 80 columns, and as JSON for programs."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from hpctrain.console import Cell, Console, Table
from hpctrain.doctor.finding import Finding, Verdict, worst

_STYLES: dict[Verdict, str] = {"pass": "green", "unknown": "dim", "warn": "yellow", "fail": "red"}
_PREFIXES = {"T": 1e12, "G": 1e9, "M": 1e6, "k": 1e3, "": 1.0, "m": 1e-3, "u": 1e-6}


def print_findings(title: str, findings: Sequence[Finding]) -> None:
    """Print the findings of one place, such as a host."""
    table = Table("check", "verdict", "found", title=title)
    for each in findings:
        found = each.found + (f"; expected: {each.expected}" if each.expected else "")
        table.add_row(each.check, Cell(each.verdict, _STYLES[each.verdict]), found)
    Console().print(table)


def print_cures(findings: Iterable[Finding]) -> None:
    """Print a sentence for each cure, once however often it was found."""
    for text in dict.fromkeys(f"{f.verdict}: {f.check}: {f.cure}" for f in findings if f.cure):
        _print_line(text)


def print_nodes(
    places: Mapping[str, Sequence[Finding]], figures: Mapping[str, Mapping[str, float]]
) -> None:
    """Print what is not well on each node, what is unknown on any, and what was measured."""
    bad = {
        host: [each for each in findings if each.verdict in ("warn", "fail")]
        for host, findings in places.items()
    }
    for host in filter(bad.__getitem__, bad):
        print_findings(f"{host}: {worst(bad[host])}", bad[host])
    print_cures(each for findings in bad.values() for each in findings)
    every = [each for findings in places.values() for each in findings]
    if lacking := [each.check for each in every if each.verdict == "unknown"]:
        # Each of eight GPUs would say the same.
        names = dict.fromkeys(re.sub(r"^GPU \d+", "GPUs", check) for check in lacking)
        _print_line(f"unknown (--json says why): {', '.join(names)}")
    heads, units = ["node", "verdict"], ["", ""]
    rows = [
        [Cell(host), Cell(worst(places[host]), _STYLES[worst(places[host])])] for host in places
    ]
    measured = [_of_node(figures.get(host, {})) for host in places]
    for name, unit in dict.fromkeys(key for each in measured for key in each):
        texts, shown = _scaled([each.get((name, unit)) for each in measured], unit)
        heads.append(name)
        units.append(shown)
        for row, text in zip(rows, texts, strict=True):
            row.append(Cell(text))
    table = Table(*heads, title="nodes", right=range(2, len(heads)))
    table.add_row(*units)
    for row in rows:
        table.add_row(*row)
    Console().print(table)
    for own in figures.values():
        if "all_reduce_latency_us" in own:  # all ranks have measured the same
            _print_line(f"all-reduce over all ranks, bus bandwidth by size: {_all_reduce(own)}")
            break


def _of_node(figures: Mapping[str, float]) -> dict[tuple[str, str], float]:
    """Return the figures of one node by heading and unit; what was not measured is left out."""
    inside = _bus(figures, "all_reduce_in_node")
    pairs = [1e6 * value for name, value in figures.items() if name.startswith("pair_")]
    shown = {
        ("matmul", "FLOP/s"): 1e12 * figures.get("matmul_tflops", 0),
        ("memory", "B/s"): 1e9 * figures.get("memory_gb_s", 0),
        ("to GPU", "B/s"): 1e9 * figures.get("to_gpu_gb_s", 0),
        ("reading", "B/s"): 1e6 * figures.get("read_mb_s", 0),
        ("in node", "B/s"): inside[max(inside)] if inside else 0,
        ("network", "B/s"): max(pairs, default=0),
    }
    return {head: value for head, value in shown.items() if value}


def _bus(figures: Mapping[str, float], name: str) -> dict[int, float]:
    """Return the bus bandwidth of an all-reduce, in bytes per second by its size in bytes."""
    found = ((re.fullmatch(rf"{name}_(\d+)_bus_gb_s", key), figures[key]) for key in figures)
    return {int(match[1]): 1e9 * value for match, value in found if match}


def _all_reduce(figures: Mapping[str, float]) -> str:
    (latency,), unit = _scaled([figures["all_reduce_latency_us"] / 1e6], "s")
    shown = [f"latency {latency} {unit}"]
    for size, value in sorted(_bus(figures, "all_reduce").items()):
        (number,), unit = _scaled([value], "B/s")
        where = f"{size >> 20} MiB" if size >= 2**20 else f"{size >> 10} KiB"
        shown.append(f"{where} {number} {unit}")
    return ", ".join(shown)


def _scaled(values: Sequence[float | None], unit: str) -> tuple[list[str], str]:
    """Return numbers of three digits, and their unit with the prefix that fits the largest."""
    most = max(value for value in values if value is not None)
    prefix, size = next((each for each in _PREFIXES.items() if most >= each[1]), ("u", 1e-6))
    parts = (None if value is None else value / size for value in values)
    texts = ["" if x is None else f"{x:,.0f}" if x >= 99.95 else f"{x:.3g}" for x in parts]
    return texts, prefix + unit


def _print_line(text: str) -> None:
    """Print a text that the terminal may wrap."""
    Console().print(Cell(text), soft_wrap=True)


def print_json(verdict: Verdict, places: Mapping[str, Sequence[Finding]], **more: Any) -> None:
    """Print one JSON object: the verdict, the findings by place, and what else was measured."""
    hosts = {
        place: {"verdict": worst(findings), "findings": [asdict(each) for each in findings]}
        for place, findings in places.items()
    }
    print(json.dumps({"verdict": verdict, "places": hosts, **more}))
