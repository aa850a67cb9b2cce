"""A tree of facts as one page: a single HTML file without scripts, which loads nothing.

It is legible in the light and in the dark, on a phone, and on paper. Texts of runs are escaped, and
a policy in the page forbids scripts and connections.
"""

from collections.abc import Iterable, Sequence
from html import escape

from hpctrain.base.secrets import mask
from hpctrain.base.terminal.terminal import harmless
from hpctrain.insight.report.tree import Bars, Curves, Fact, Pairs, Rows, Section, Sentences
from hpctrain.insight.report.views.charts import svg

_MOST_ROWS = 200
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#6b6b6b")  # of parts
_STYLE = """
:root{color-scheme:light dark;--text:#1a1a1a;--back:#fff;--card:#f6f7f9;--grid:#d8dade}
@media screen and (prefers-color-scheme:dark){
:root{--text:#e8e8e8;--back:#15171a;--card:#1e2125;--grid:#3a3f45}}
*{box-sizing:border-box}body{margin:0 auto;max-width:1440px;padding:1rem;background:var(--back);
color:var(--text);font:15px/1.5 system-ui,sans-serif;overflow-wrap:anywhere}
h1{font-size:1.3rem}h2{font-size:1.05rem;margin:1.6rem 0 .5rem}.said{font-size:1.1rem}
.bar{display:flex;height:1.6rem;border-radius:4px;overflow:hidden}
.key{display:flex;flex-wrap:wrap;gap:.3rem 1.1rem;padding:0;list-style:none}
.key i{display:inline-block;width:.8em;height:.8em;margin-right:.4em}
.bar,.key i{print-color-adjust:exact}.scroll{overflow-x:auto}
.charts{display:grid;gap:1rem;grid-template-columns:repeat(auto-fill,minmax(min(100%,340px),1fr))}
figure{margin:0;background:#fff;border-radius:6px;padding:.4rem;break-inside:avoid}
figure svg{width:100%;height:auto;display:block}
table{border-collapse:collapse;font-variant-numeric:tabular-nums}
td,th{padding:.2rem .8rem .2rem 0;text-align:left;border-bottom:1px solid var(--grid);
vertical-align:top;overflow-wrap:normal}td:first-child{white-space:nowrap}
dl{display:grid;grid-template-columns:max-content minmax(0,1fr);gap:.25rem 1rem}dd{margin:0}
code{background:var(--card);padding:0 .25em}
@media(max-width:480px){dl{grid-template-columns:1fr}dt{font-weight:600}dd{margin-bottom:.4rem}
tr{display:block;padding:.4rem 0;border-bottom:1px solid var(--grid)}th,td:empty{display:none}
td,td:first-child{display:grid;grid-template-columns:10rem 1fr;padding:0;border:0;
white-space:normal;overflow-wrap:anywhere}
td::before{content:attr(data-name);font-weight:600}}
"""
_HEAD = """<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width,initial-scale=1">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<title>{title}</title><style>{style}</style></head><body>
"""


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
