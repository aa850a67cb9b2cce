"""Findings as a table for people and as JSON for programs."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
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


def summary(verdicts: Mapping[str, Iterable[Finding]]) -> str:
    """Return one line with the number of places by verdict."""
    found = [worst(findings) for findings in verdicts.values()]
    counted = [f"{found.count(each)} {each}" for each in ("pass", "warn", "fail") if each in found]
    return ", ".join(counted)


def print_json(verdict: Verdict, places: Mapping[str, Sequence[Finding]], **more: Any) -> None:
    """Print one JSON object: the verdict, the findings by place, and what else was measured."""
    hosts = {
        place: {"verdict": worst(findings), "findings": [each.facts() for each in findings]}
        for place, findings in places.items()
    }
    print(json.dumps({"verdict": verdict, "places": hosts, **more}))
