"""A page of plots: a .png file, or an .html file that needs no other files."""

import base64
import html
import io
import os
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data_prep.datasets.dataset import DataSet
from data_prep.libraries import library
from data_prep.show import plots
from data_prep.show.console import number
from data_prep.show.summary import Summary, class_name, not_finite
from data_prep.show.views import View, views
from hpctrain.disk import temporary
from hpctrain.errors import ConfigError, StorageError
from hpctrain.shards.index import Split
from hpctrain.terminal import printable

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MAX_HEIGHT = 400.0  # inches; matplotlib draws at most 2**16 pixels
_CSS = """
body { font: 15px/1.5 system-ui, sans-serif; color: #22272e; max-width: 1100px; margin: 2em auto;
       padding: 0 1em } h1 { font-size: 1.5em; margin-bottom: 0 } h2 { font-size: 1.1em }
p { color: #6f7681; margin-top: .2em } table { border-collapse: collapse; margin: 1em 0 }
th, td { padding: .25em .9em .25em 0; text-align: right; border-bottom: 1px solid #e8eaed }
th { color: #6f7681; font-weight: 500 } th:first-child, td:first-child, th:nth-child(2),
td:nth-child(2) { text-align: left } img { width: 100%; height: auto }
code { font-size: .9em } .fold { overflow-x: auto }
"""


def check(path: Path) -> None:
    """Check that a plot can be made, before the statistics are computed."""
    if path.suffix.lower() not in (".png", ".html"):
        raise ConfigError(f"--plot {path}: it is a .png or .html file")
    if not path.parent.is_dir():
        raise ConfigError(f"--plot {path}: there is no folder {path.parent}")
    library("matplotlib", "--plot", error=ConfigError)


def draw(path: Path, data: DataSet, splits: Sequence[Split], summaries: Sequence[Summary]) -> None:
    """Write a .png or a self-contained .html file; an existing file is replaced."""
    from matplotlib import rc_context

    found = list(views(data, splits, summaries))
    with rc_context(plots.STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")  # the font lacks a script
        if path.suffix.lower() == ".png":
            content = _png(_page(data, found))
        else:
            content = _html(data, found, summaries).encode("utf-8", "replace")
    unfinished = temporary(path)
    try:
        with unfinished.open("xb") as file:  # never through a link that is there
            file.write(content)
        os.replace(unfinished, path)
    except OSError as error:
        with suppress(OSError):
            unfinished.unlink()
        raise StorageError(f"cannot write {path}: {error.strerror}") from None


def _page(data: DataSet, found: Sequence[View]) -> "Figure":
    from matplotlib.figure import Figure

    heights = [0.75, *map(plots.height, found)]
    if sum(heights) > _MAX_HEIGHT:
        raise ConfigError(
            f"--plot: {len(found)} fields are too many for one picture; --field takes some of "
            "them, and an .html file has room for all"
        )
    figure = Figure(figsize=(plots.WIDTH, sum(heights)), facecolor="white")
    parts = figure.subfigures(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0]
    inches = heights[0]
    parts[0].text(0.045, 0.62, printable(data.folder.name), fontsize=15, fontweight="bold")
    parts[0].text(0.045, 0.62 - 0.24 / inches, _subtitle(data), fontsize=9, color=plots.FAINT)
    for part, view in zip(parts[1:], found, strict=True):
        plots.draw(part, view)
    return figure


def _subtitle(data: DataSet) -> str:
    counts = [f"{name} {data.index.split(name).count:,}" for name in data.index.splits]
    return f"{'   '.join(counts)}   {data.index.digest}"


def _png(figure: "Figure") -> bytes:
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=150)
    return content.getvalue()


def _html(data: DataSet, found: Sequence[View], summaries: Sequence[Summary]) -> str:
    """Return a page that contains its pictures and links to nothing."""
    from matplotlib.figure import Figure

    title = html.escape(printable(data.folder.name))
    parts = [
        '<!doctype html><html lang="en"><meta charset="utf-8">',
        f"<title>{title}</title><style>{_CSS}</style>",
        f"<h1>{title}</h1><p>{html.escape(_subtitle(data))}</p>",
        _table(
            ["field", "type", "split", "samples", "mean", "std", "min", "max", "not finite"],
            [
                [
                    *(s.name, s.field, s.split, f"{s.count:,}"),
                    *map(number, (s.mean, s.std, s.min, s.max)),
                    not_finite(s),
                ]
                for s in summaries
            ],
        ),
    ]
    for view in found:
        figure = Figure(figsize=(plots.WIDTH, plots.height(view)), facecolor="white")
        plots.draw(figure, view)
        picture = base64.b64encode(_png(figure)).decode()
        parts.append(f'<img alt="{html.escape(view.name)}" src="data:image/png;base64,{picture}">')
        for split, summary in view.summaries.items():
            if summary.classes:
                parts.append(_class_table(split, summary, view.categories))
    made: Mapping[str, Any] = data.index.provenance
    if made.get("command"):
        command = html.escape(printable(str(made["command"])))
        parts.append(f"<p>made by <code>{command}</code></p>")
    return "\n".join([*parts, "</html>", ""])


def _class_table(split: str, summary: Summary, categories: Sequence[str]) -> str:
    classes = summary.classes or {}
    rows = [
        [value, class_name(value, categories), f"{count:,}", f"{100 * count / summary.count:.2f} %"]
        for value, count in classes.items()
    ]
    caption = html.escape(f"{summary.name} in {split}: {len(classes):,} values")
    table = _table(["value", "name", "samples", "share"], rows)
    return f"<details><summary>{caption}</summary>{table}</details>"


def _table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    def line(cells: Sequence[object], tag: str) -> str:
        texts = (html.escape(printable(str(cell))) for cell in cells)
        return "<tr>" + "".join(f"<{tag}>{text}</{tag}>" for text in texts) + "</tr>"

    body = "\n".join(line(row, "td") for row in rows)
    return f'<div class="fold"><table>{line(columns, "th")}\n{body}</table></div>'
