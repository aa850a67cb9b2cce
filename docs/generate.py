"""A hook of MkDocs: fill the pages of the reference from the schema and from the commands.

A page has the line `<!-- generated: keys -->`, `metrics`, `json` and so on where the text belongs.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from collections.abc import Callable, Iterator
from itertools import groupby
from typing import Any
from unittest import mock

import data_prep.cli
import hpctrain.cli
from hpctrain.base.gone import table
from hpctrain.config.explain import OTHER_NAMES
from hpctrain.config.metric_registry import registered
from hpctrain.config.schema import all_keys
from hpctrain.insight.estimates import hardware
from hpctrain.insight.reference.keys import row_of


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Return the text of a page with the generated parts; MkDocs calls this for each page."""
    makers = {
        "keys": keys,
        "metrics": metrics,
        "commands": commands,
        "gone": gone,
        "names": names,
        "hardware": kinds,
        "json": output,
    }
    for name, made in makers.items():
        mark = f"<!-- generated: {name} -->"
        if mark in markdown:
            markdown = markdown.replace(mark, "\n".join(made()))
    return markdown


def keys() -> Iterator[str]:
    """Yield the keys of each section; a section stands once, with all of its own keys."""
    sections: dict[str, list[Any]] = {}
    for member in all_keys():
        sections.setdefault(member.name.rpartition(".")[0], []).append(member)
    for section, members in sections.items():
        yield f"\n## {section or 'top level'}\n"
        for member in members:
            name, kind, default, unit, allowed, identity, meaning = map(_text, row_of(member))
            value = ", ".join(filter(None, (kind, unit, allowed)))
            mark = ", *identity*" if identity else ""
            yield f"`{name}`\n:   {value}; default `{default or ' '}`{mark}\n\n    {meaning}\n"


def metrics() -> Iterator[str]:
    """Yield the metrics of each group."""
    for group, members in groupby(registered(), lambda metric: metric.name.partition("/")[0]):
        yield f"\n## {group}\n"
        for metric in members:
            name, unit, text = map(_text, metric)
            yield f"`{name}`\n:   {f'In {unit}. ' if unit else ''}{text}\n"


def gone() -> Iterator[str]:
    """Yield the table of what has left, and what takes its place."""
    yield "| what has left | instead |\n| --- | --- |"
    for name, what in table().items():
        yield f"| `{name}` | {_text(what['instead'])} |"


def names() -> Iterator[str]:
    """Yield the table of the names that other tools have for our keys."""
    yield "| elsewhere | key |\n| --- | --- |"
    for theirs, ours in OTHER_NAMES.items():
        yield f"| `{theirs}` | `{ours}` |"


def kinds() -> Iterator[str]:
    """Yield the table of the hardware that `plan` knows."""
    yield "| `hardware=` | GPU | Memory that torch sees, GiB | bf16, dense TFLOP/s |"
    yield "| --- | --- | --- | --- |"
    for each in map(hardware.load, hardware.known()):
        if each.memory_bytes is not None:  # the example has no figures
            memory, peak = each.memory_bytes / 2**30, (each.peak("bf16") or 0) / 1e12
            yield f"| `{each.name}` | {each.title} | {memory:.1f} | {peak:,.0f} |"


def output() -> Iterator[str]:
    """Yield the schema of what each command prints with --json."""
    schemas = json.loads(_help(hpctrain.cli.main, "hpctrain", "--help", "json"))
    for name, schema in schemas["$defs"].items():
        yield f"\n## {name}\n\n```json\n{json.dumps(schema, indent=2)}\n```"


def commands() -> Iterator[str]:
    """Yield the help text of each command."""
    yield "\n## python -m hpctrain\n"
    yield _block(_help(hpctrain.cli.main, "hpctrain", "--help"))
    yield _block(_help(hpctrain.cli.main, "hpctrain", "--help", "all"))
    for name in hpctrain.cli.COMMANDS:
        for form in ("", *hpctrain.cli.FORMS.get(name, ())):
            words = [name, form] if form else [name]
            yield f"\n### hpctrain {' '.join(words)}\n"
            yield _block(_help(hpctrain.cli.main, "hpctrain", *words, "--help"))
    yield "\n## python -m data_prep\n"
    yield _block(_help(data_prep.cli.main, "data_prep", "--help"))
    for name in data_prep.cli.COMMANDS:
        yield f"\n### data_prep {name}\n"
        yield _block(_help(data_prep.cli.main, "data_prep", name, "--help"))


def _help(main: Callable[[], Any], program: str, *words: str) -> str:
    said = io.StringIO()
    with (
        mock.patch.object(sys, "argv", [program, *words]),
        mock.patch.dict(os.environ, COLUMNS="100"),
        contextlib.redirect_stdout(said),
        contextlib.suppress(SystemExit),
    ):
        umask = os.umask(0o022)
        try:
            main()
        finally:
            os.umask(umask)
    if not said.getvalue():
        raise RuntimeError(f"{program} {' '.join(words)} prints nothing")
    return said.getvalue()


def _block(text: str) -> str:
    return f"```text\n{text.rstrip()}\n```"


def _text(text: str) -> str:
    return text.replace("<", "&lt;")
