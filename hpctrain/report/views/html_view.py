"""The report as one page: a single HTML file without scripts, which loads nothing from elsewhere.

It is legible in the light and in the dark, on a phone, and on paper. Texts of runs are escaped, and
a policy in the page forbids scripts and connections.
"""

from collections.abc import Iterable, Sequence
from html import escape

from hpctrain.job.summary import pages_of
from hpctrain.report.account.advice import notes
from hpctrain.report.account.run_account import RunAccount
from hpctrain.report.account.standing import Fact, command, date, facts, verdict, why
from hpctrain.report.account.time_parts import PARTS
from hpctrain.report.sweeps import search_trials
from hpctrain.report.sweeps.parameters import Sweep, cause
from hpctrain.report.sweeps.seeds import Setting, columns, ranking
from hpctrain.report.views.charts import Chart, svg
from hpctrain.report.views.terminal_view import figures, shared_notes
from hpctrain.search.standing import Standing
from hpctrain.secrets import mask
from hpctrain.terminal import harmless
from hpctrain.units import duration

_MOST_ROWS = 200
_STYLE = """
:root{color-scheme:light dark;--text:#1a1a1a;--soft:#5a5a5a;--back:#fff;--card:#f6f7f9;
--grid:#d8dade;--s0:#0072b2;--s1:#c44e00;--s2:#00805c;--s3:#b0568a;--s4:#a86f00;--s5:#5b2a86;
--s6:#6b6b6b}
@media screen and (prefers-color-scheme:dark){:root{--text:#e8e8e8;--soft:#a9adb3;--back:#15171a;
--card:#1e2125;--grid:#3a3f45;--s0:#56b4e9;--s1:#ff9352;--s2:#3cd0a0;--s3:#e49cc6;--s4:#f0b942;
--s5:#c3b1f5;--s6:#b0b0b0}}
*{box-sizing:border-box}body{margin:0 auto;max-width:1440px;padding:1rem;background:var(--back);
color:var(--text);font:15px/1.5 system-ui,sans-serif}
h1{font-size:1.3rem;overflow-wrap:anywhere}h2{font-size:1.05rem;margin:1.6rem 0 .5rem}
.soft{color:var(--soft)}.bar{display:flex;height:1.6rem;border-radius:4px;overflow:hidden;
background:var(--card)}.bar span{height:100%}.key{display:flex;flex-wrap:wrap;gap:.3rem 1.1rem;
margin:.6rem 0;padding:0;list-style:none}.key i{display:inline-block;width:.8em;height:.8em;
margin-right:.4em;border-radius:2px}.charts{display:grid;gap:1rem;
grid-template-columns:repeat(auto-fill,minmax(min(100%,340px),1fr))}
figure{margin:0;background:var(--card);border-radius:6px;padding:.4rem;break-inside:avoid}
figure svg{width:100%;height:auto;display:block}.scroll{overflow-x:auto}
table{border-collapse:collapse;font-variant-numeric:tabular-nums}
td,th{padding:.2rem .8rem .2rem 0;text-align:left;border-bottom:1px solid var(--grid);
vertical-align:top}th{font-weight:600}
.heads td,.heads th{white-space:nowrap}
.long td:nth-child(3){white-space:normal;min-width:12rem;overflow-wrap:anywhere}
.verdict{font-size:1.1rem;overflow-wrap:anywhere}a{color:var(--s0)}
dl{display:grid;grid-template-columns:max-content minmax(0,1fr);gap:.25rem 1rem;margin:1rem 0}
dt{color:var(--soft)}dd{margin:0;overflow-wrap:anywhere}code{background:var(--card);padding:0 .25em;
border-radius:3px;overflow-wrap:anywhere}
@media(max-width:480px){dl{grid-template-columns:1fr;gap:0}dt{margin-top:.5rem}}
@media print{:root{color-scheme:light;--text:#000;--card:#fff;--soft:#444}
body{font-size:11px;max-width:none}
h2{break-after:avoid}dl{grid-template-columns:7rem minmax(0,1fr)}.charts{break-before:avoid}
.bar{print-color-adjust:exact}.key i{print-color-adjust:exact}
.charts{grid-template-columns:1fr 1fr}}
"""
_HEAD = """<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width,initial-scale=1">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<title>{title}</title><style>{style}</style></head><body>
"""


def run_page(account: RunAccount, charts: Sequence[Chart]) -> str:
    """Return the page of one run."""
    parts = [
        f'<p class="verdict">{escape(verdict(account))}'
        f' <span class="soft">As of {date(account.now)}.</span></p>',
        _facts(facts(account)),
        _time_bar(account) if account.spans else "",
        _listed("Notes", notes(account)),
        _attempts(account),
        "<h2>Figures</h2>" + _table([], figures(account)) if account.spans else "",
        _drawn(charts),
        _listed("Left out", account.left_out),
    ]
    return _page(account.name, parts)


def sweep_page(
    accounts: Sequence[RunAccount],
    sweep: Sweep,
    settings: Sequence[Setting],
    charts: Sequence[Chart],
    more: Iterable[str] = (),
    search: Standing | None = None,
) -> str:
    """Return the page of several runs; the settings are of `--over`, and `more` says of scaling."""
    hours = sum(account.gpu_hours for account in accounts)
    seconds = sum(account.time["allocated"] for account in accounts)
    total = f"{len(accounts)} runs, {duration(seconds)} allocated"
    parts = [
        *_answer(sweep, settings, search),
        f'<p class="soft">{total}{f", {hours:.3g} GPU-hours" if hours else ""}. '
        f"As of {date(max(account.now for account in accounts))}.</p>",
        _listed("Scaling", list(more)),
        _estimates(settings),
        _drawn(charts),
        *(_trials(search) if search else _best(sweep)),
        _listed("Without a result", [f"{each.name}: {cause(each)}" for each in sweep.others]),
        _listed("Notes", shared_notes(accounts)),
    ]
    return _page(f"{len(accounts)} runs by {sweep.metric}", parts)


def curves_page(title: str, charts: Sequence[Chart]) -> str:
    """Return a page of charts alone."""
    return _page(title, [_drawn(charts)])


def _page(title: str, parts: Iterable[str]) -> str:
    head = _HEAD.format(title=escape(title), style=_STYLE)
    body = "\n".join(filter(None, parts))
    return harmless(mask(head + f"<h1>{escape(title)}</h1>\n" + body + "\n</body></html>\n"))


def _time_bar(account: RunAccount) -> str:
    bar = key = ""
    colors = {title: number for number, title in enumerate(PARTS.values())}
    for title, seconds, share in account.shown_parts():
        number = colors[title]
        color = f"background:var(--s{number % 7});opacity:{1 if number < 7 else 0.55}"
        bar += f'<span style="width:{100 * share:.3f}%;{color}" title="{title}"></span>'
        key += f'<li><i style="{color}"></i>{title} {100 * share:.1f}% ({duration(seconds)})</li>'
    shown = f'<div class="bar">{bar}</div><ul class="key">{key}</ul>'
    return f"<h2>Where the time went</h2>\n{shown}"


def _attempts(account: RunAccount) -> str:
    rows = [
        (
            str(span.number),
            span.state,
            why(span),
            span.steps,
            duration(span.seconds),
            duration(span.parts["lost"]),
            ", ".join(account.hosts(span)),
        )
        for span in account.spans
    ]
    heads = ["", "state", "why it ended", "steps", "time", "lost", "hosts"]
    return f"<h2>Attempts</h2>\n{_table(heads, rows, 'long')}" if rows else ""


def _facts(rows: Iterable[Fact]) -> str:
    """Return what the run is, as rows of a name and a text."""
    body = ""
    for name, text, link in rows:
        shown = f'<a href="{escape(link)}">{escape(text)}</a>' if link else _with_code(text)
        body += f"<dt>{escape(name)}</dt><dd>{shown}</dd>"
    return f"<dl>{body}</dl>"


def _answer(sweep: Sweep, found: Sequence[Setting], search: Standing | None) -> Iterable[str]:
    """Yield what the runs have shown: the best setting and run, its command, what mattered."""
    lines = [*ranking(found), *(search_trials.said(search) if search else sweep.answer())]
    yield '<p class="verdict">' + "<br>".join(_with_code(line) for line in lines) + "</p>"
    if sweep.finished:
        best = sweep.finished[0]
        rows = [Fact("its command", f"`{text}`") for text in [command(best)] if text]
        for name, page in zip(("its page", "all runs"), pages_of(best.facts.path), strict=False):
            rows.append(Fact(f"{name} in MLflow", page, page))
        yield _facts(rows)


def _estimates(settings: Sequence[Setting]) -> str:
    keys, metrics = columns(settings)
    rows = [[*setting.cells(keys), ", ".join(setting.missing)] for setting in settings]
    title = "<h2>Mean and 95% confidence interval of the mean (t)</h2>"
    return f"{title}\n{_table([*keys, *metrics, 'n', 'without'], rows)}" if rows else ""


def _best(sweep: Sweep) -> Iterable[str]:
    if not sweep.finished:
        yield f"<p>No run has a value of {escape(sweep.metric)}.</p>"
        return
    rows = [sweep.cells(account) for account in sweep.finished[:_MOST_ROWS]]
    yield "<h2>Runs, best first</h2>"
    yield _table(["run", sweep.metric, *sweep.keys, "time", "goodput"], rows)
    if len(sweep.finished) > _MOST_ROWS:
        yield f'<p class="soft">{len(sweep.finished) - _MOST_ROWS} more: --json has all.</p>'


def _trials(search: Standing) -> Iterable[str]:
    titles = "Rungs", "Trials, the best of the highest rung first"
    for title, (heads, *rows) in zip(titles, search.tables(), strict=True):
        yield f"<h2>{title}</h2>{_table(heads, rows[:_MOST_ROWS])}"


def _drawn(charts: Sequence[Chart]) -> str:
    figures = "\n".join(f"<figure>{svg(chart)}</figure>" for chart in charts)
    return f'<h2>Curves</h2><div class="charts">{figures}</div>' if charts else ""


def _listed(title: str, lines: Sequence[str]) -> str:
    items = "".join(f"<li>{_with_code(line)}</li>" for line in lines[:_MOST_ROWS])
    return f"<h2>{escape(title)}</h2>\n<ul>{items}</ul>" if lines else ""


def _with_code(line: str) -> str:
    """Return the text with what is between backquotes as code."""
    pieces = escape(line).split("`")
    return "".join(f"<code>{each}</code>" if n % 2 else each for n, each in enumerate(pieces))


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]], kind: str = "") -> str:
    """Return a table that scrolls sideways; the third column of a `long` one has long texts."""
    head = "".join(f"<th>{escape(each)}</th>" for each in heads)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    named = f' class="heads {kind}"' if heads else ""
    first = f"<tr>{head}</tr>" if heads else ""
    return f'<div class="scroll"><table{named}>{first}{body}</table></div>'
