"""A tree of facts on the terminal: bars as jobstats prints them, tables, and sentences."""

from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from hpctrain.base.terminal.console import Cell, Table
from hpctrain.insight.report.tree import Bars, Pairs, Rows, Section, Sentences

_BAR = 20  # characters; a line fits into 60
_MOST = 20  # rows of a table and of a list


def show(title: str, sections: Sequence[Section], most: int = _MOST) -> RenderableType:
    """Return the report for `Console.print`, with so many rows of each table at most."""
    parts: list[RenderableType] = [Cell(title, "bold")]
    for section in sections:
        if shown := [*_shown(section, most)]:
            named = [Text(section.title, "bold")] if section.title else []
            parts += [Text(), *named, *shown]
    return Group(*parts)


def _shown(section: Section, most: int) -> Iterator[RenderableType]:
    match section:
        case Pairs(_, facts):
            width = max((len(f.name) for f in facts if f.text), default=0)
            for fact in facts:  # each by itself: a link must not make the others wider
                if fact.text:
                    yield from _table(["", ""], [[f"  {fact.name:<{width}}", fact.text]], 1)
        case Bars():
            for _, fact, share in section.shares():
                drawn = ("|" * round(_BAR * share)).ljust(_BAR)
                yield Text(f"  {fact.name:<15}[{drawn}{100 * share:5.1f}%]  {fact.text}")
        case Rows():
            heads, rows = section.columns()
            yield from _table(heads, rows, most)
        case Sentences(title, _, lines):
            shown = lines[:most] if title else lines
            yield from (Cell(f"{'  * ' * bool(title)}{line}") for line in shown)
            yield from _more(len(lines) - len(shown))


def _table(heads: list[str], rows: list[list[str]], most: int) -> Iterator[RenderableType]:
    if rows:
        table = Table(*heads)
        for row in rows[:most]:
            table.add_row(*row)
        yield table
    yield from _more(len(rows) - most)


def _more(count: int) -> Iterator[RenderableType]:
    if count > 0:
        yield Text(f"  ... {count} more (--json)")
