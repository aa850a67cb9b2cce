"""A tree of facts as one page: a single HTML file without scripts, which loads nothing.

It is legible in the light and in the dark, on a phone, and on paper. Texts of runs are escaped, and
a policy in the page forbids scripts and connections.
"""

from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

from hpctrain.base.secrets import mask
from hpctrain.base.terminal.terminal import harmless
from hpctrain.insight.report.tree import Bars, Curves, Fact, Pairs, Rows, Section, Sentences
from hpctrain.insight.report.views.charts import svg

_MOST_ROWS = 200
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#6b6b6b")  # of parts
_HEAD, _STYLE = (Path(__file__).with_name(f"page.{kind}").read_text() for kind in ("html", "css"))


def page(title: str, sections: Sequence[Section]) -> str:
    """Return the page."""
    head = _HEAD.format(title=escape(title), style=_STYLE)
    body = [f"<h1>{escape(title)}</h1>", *filter(None, map(_shown, sections)), "</body></html>\n"]
    return harmless(mask(head + "\n".join(body)))


def _shown(section: Section) -> str:
    match section:
        case Pairs(title, facts):
            body = "".join(_fact(fact) for fact in facts if fact.text)
            return _titled(title, body and f"<dl>{body}</dl>")
        case Bars():
            return _titled(section.title, _bar(section))
        case Rows():
            return _titled(section.title, _table(*section.columns()))
        case Sentences("", _, lines):
            return f'<p class="said">{"<br>".join(map(_with_code, lines))}</p>' if lines else ""
        case Sentences(title, _, lines):
            items = "".join(f"<li>{_with_code(line)}</li>" for line in lines[:_MOST_ROWS])
            return _titled(title, items and f"<ul>{items}</ul>")
        case Curves(charts, title):
            figures = "\n".join(f"<figure>{svg(chart)}</figure>" for chart in charts)
            return _titled(title, figures and f'<div class="charts">{figures}</div>')


def _titled(title: str, body: str) -> str:
    return f"<h2>{escape(title)}</h2>\n{body}" if title and body else body


def _fact(fact: Fact) -> str:
    text = _with_code(fact.text)
    if fact.link:
        text = f'<a href="{escape(fact.link)}">{escape(fact.text)}</a>'
    return f"<dt>{escape(fact.name)}</dt><dd>{text}</dd>"


def _bar(section: Bars) -> str:
    bar = key = ""
    for n, fact, share in section.shares():
        color = f"background:{_COLOURS[n % 7]};opacity:{1 if n < 7 else 0.55}"
        name = escape(fact.name)
        bar += f'<span style="width:{100 * share:.3f}%;{color}" title="{name}"></span>'
        key += f'<li><i style="{color}"></i>{name} {100 * share:.1f}% ({escape(fact.text)})</li>'
    return bar and f'<div class="bar">{bar}</div><ul class="key">{key}</ul>'


def _with_code(line: str) -> str:
    """Return the text with what is between backquotes as code."""
    pieces = escape(line).split("`")
    return "".join(f"<code>{each}</code>" if n % 2 else each for n, each in enumerate(pieces))


def _table(heads: Iterable[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table. On a phone each row is a list of names and values, so nothing is cut off."""
    if not rows:
        return ""
    names = [*map(escape, heads)]
    head = "".join(f"<th>{each}</th>" for each in names)
    cells = (zip(names, map(escape, row), strict=True) for row in rows[:_MOST_ROWS])
    body = "".join(
        "<tr>" + "".join(f'<td data-name="{name}">{cell}</td>' for name, cell in row) + "</tr>"
        for row in cells
    )
    more = len(rows) - _MOST_ROWS
    rest = f"<p>{more} more: --json has all.</p>" if more > 0 else ""
    return f'<div class="scroll"><table><tr>{head}</tr>{body}</table></div>{rest}'
