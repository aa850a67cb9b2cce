"""One tree of facts: what a command tells, in sections. Three writers show any such tree.

run, sweep, two runs, nodes ── sections ──┬── views.terminal_view.show   tables, bars, sentences
                                          ├── views.html_view.page       the same, with charts
                                          └── as_json                    all that has a key
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from matplotlib.axes import Axes


class Fact(NamedTuple):
    """A value: programs get it under its key, and people as a text beside its name.

    Without a key only people get it, and without a text only programs. Code stands between
    backquotes in a text; a link says where the text leads.
    """

    key: str
    value: Any = None
    name: str = ""
    text: str = ""
    link: str = ""


def number(key: str, value: Any, name: str, form: str = "{}") -> Fact:
    """Return a number with its text; people do not see one that is not known or 0."""
    return Fact(key, value, name, form.format(value) if value and name else "")


@dataclass
class Pairs:
    """Names and texts."""

    title: str
    rows: list[Fact]


@dataclass
class Bars:
    """Parts of a whole, as bars; the values are numbers."""

    title: str
    key: str
    rows: list[Fact]

    def shares(self) -> list[tuple[int, Fact, float]]:
        """Return place, fact and share of each part that people see."""
        total = sum(fact.value for fact in self.rows if fact.name)
        return [(n, fact, fact.value / total) for n, fact in enumerate(self.rows) if fact.text]


@dataclass
class Rows:
    """A table: each row has the same facts, whose names are the titles of the columns."""

    title: str
    key: str
    rows: list[list[Fact]]

    def columns(self) -> tuple[list[str], list[list[str]]]:
        """Return the titles, and the cells of each row, without columns that are empty."""
        heads = [fact.name for fact in self.rows[0]] if self.rows else []
        shown = [
            n for n, head in enumerate(heads) if head and any(row[n].text for row in self.rows)
        ]
        return [heads[n] for n in shown], [[row[n].text for n in shown] for row in self.rows]

    @classmethod
    def of(cls, title: str, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> "Rows":
        """Return a table for people."""
        made = [[Fact("", None, *each) for each in zip(heads, row, strict=True)] for row in rows]
        return cls(title, "", made)


@dataclass
class Sentences:
    """A list; without a title, the sentences in which a report begins."""

    title: str
    key: str
    lines: list[str]


@dataclass(frozen=True)
class Chart:
    """What is drawn on axes, in the colours of matplotlib's settings, and its title."""

    title: str
    draw: Callable[["Axes"], None]


@dataclass
class Curves:
    """Charts, which only a page has."""

    charts: list[Chart]
    title: str = "Curves"


Section = Pairs | Bars | Rows | Sentences | Curves


def as_json(sections: Sequence[Section]) -> dict[str, Any]:
    """Return what programs get, for `print_json`."""
    told: dict[str, Any] = {}
    for section in sections:
        match section:
            case Pairs(_, rows):
                told |= _keyed(rows)
            case Bars(_, key, rows):
                told[key] = {name: round(value, 3) for name, value in _keyed(rows).items()}
            case Rows(_, key, table) if key:
                told[key] = [_keyed(row) for row in table]
            case Sentences(_, key, lines) if key:
                told[key] = lines
    return told


def _keyed(facts: Sequence[Fact]) -> dict[str, Any]:
    return {fact.key: fact.value for fact in facts if fact.key}
