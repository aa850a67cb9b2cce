"""Plots of fields as a .png file.

Each field has some samples on the left, and the distribution of its values on the right.
"""

import io
import math
import os
import warnings
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from data_prep.datasets.dataset import DataSet, evenly
from data_prep.libraries import library
from data_prep.show.console import number
from data_prep.show.views import Summary, View, class_name, views
from hpctrain.disk import temporary
from hpctrain.errors import ConfigError, StorageError
from hpctrain.shards.index import Split
from hpctrain.shards.types import Array
from hpctrain.terminal import printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

_WIDTH, _MAX_HEIGHT = 11.0, 400.0  # inches; matplotlib draws at most 2**16 pixels
_COLUMNS = 8  # images in a row
_PANELS, _CURVES, _BARS, _BINS = 4, 12, 30, 60  # the most of each
_COLOURS = ("#2f6db5", "#e58634", "#3c9d6c", "#a05bb0", "#c8485c", "#6f7681")
_FAINT = "#8a929c"
_STYLE: Any = {
    "font.size": 8.5,
    "text.parse_math": False,  # names may contain a $
    "axes.edgecolor": "#c3c8ce",
    "axes.labelcolor": _FAINT,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.color": "#e8eaed",
}


def check(path: Path) -> None:
    """Check that a plot can be made, before the statistics are computed."""
    if path.suffix.lower() != ".png":
        raise ConfigError(f"--plot {path}: it is a .png file")
    if not path.parent.is_dir():
        raise ConfigError(f"--plot {path}: there is no folder {path.parent}")
    library("matplotlib", "--plot", error=ConfigError)


def draw(path: Path, data: DataSet, splits: Sequence[Split], summaries: Sequence[Summary]) -> None:
    """Write a .png file; an existing file is replaced.

    Each split has its own colour; the samples come from the first one.
    """
    from matplotlib import rc_context

    found = list(views(data, splits, summaries))
    with rc_context(_STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")  # the font lacks a script
        content = _png(data, found)
    unfinished = temporary(path)
    try:
        with unfinished.open("xb") as file:  # never through a link that is there
            file.write(content)
        os.replace(unfinished, path)
    except OSError as error:
        with suppress(OSError):
            unfinished.unlink()
        raise StorageError(f"cannot write {path}: {error.strerror}") from None


def _png(data: DataSet, found: Sequence[View]) -> bytes:
    from matplotlib.figure import Figure

    heights = [0.75, *map(_height, found)]
    if sum(heights) > _MAX_HEIGHT:
        raise ConfigError(
            f"--plot: {len(found)} fields are too many for one picture; --field takes some of them"
        )
    figure = Figure(figsize=(_WIDTH, sum(heights)), facecolor="white")
    parts = figure.subfigures(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0]
    counts = [f"{name} {data.index.split(name).count:,}" for name in data.index.splits]
    about = f"{'   '.join(counts)}   {data.index.digest}"
    parts[0].text(0.045, 0.62, printable(data.folder.name), fontsize=15, fontweight="bold")
    parts[0].text(0.045, 0.3, about, fontsize=9, color=_FAINT)
    for part, view in zip(parts[1:], found, strict=True):
        _draw(part, view)
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=150)
    return content.getvalue()


def _height(view: View) -> float:
    """Return the height of the drawing of a field in inches."""
    if view.pictures:
        return 1.1 + 0.8 * -(-len(view.pictures) // _COLUMNS)
    bars = [len(s.values.classes) for s in view.summaries.values() if s.values.classes]
    return 1.3 + 0.17 * max(bars) if bars and 6 <= max(bars) <= _BARS else 2.7


def _draw(part: "Figure | SubFigure", view: View) -> None:
    inches = _height(view)
    top, bottom = 1 - 0.65 / inches, 0.5 / inches
    first = next(iter(view.summaries.values()))
    part.text(0.045, 1 - 0.22 / inches, view.name, fontsize=11, fontweight="bold", va="center")
    said = _described(first)
    part.text(0.955, 1 - 0.22 / inches, said, color=_FAINT, va="center", ha="right")
    left, shape = 0.16 if first.values.classes else 0.09, view.field.shape
    if view.pictures or view.samples:
        left = 0.65
        space: Any = {"left": 0.06, "right": 0.57, "top": top, "bottom": bottom}
        note = f"above each: its {view.label or 'number'}"
        if view.pictures:
            _images(part, space, view)
        elif len(shape) > 1 and min(shape[-2:]) > 1:
            middle = tuple(size // 2 for size in shape[:-2])
            _panels(part, space, view, middle)
            note += f", slice {list(middle)}" if middle else ""
        else:
            _curves(part.add_subplot(part.add_gridspec(**space)[0]), view)
            note = f"{min(_CURVES, len(view.samples))} samples"
        part.text(0.045, 1 - 0.4 / inches, note, fontsize=7.5, color=_FAINT, va="center")
    axes = part.add_subplot(part.add_gridspec(left=left, right=0.955, top=top, bottom=bottom)[0])
    if any(summary.values.classes for summary in view.summaries.values()):
        _classes(axes, view)
    else:
        _histogram(axes, view)
    if len(view.summaries) > 1 and axes.get_legend_handles_labels()[0]:
        axes.legend(loc="lower right", bbox_to_anchor=(1.01, 0.98), ncols=6, frameon=False)


def _described(summary: Summary) -> str:
    text, values = [str(summary.field)], summary.values
    if values.lengths:
        text.append(f"lengths {number(values.lengths.min)} to {number(values.lengths.max)}")
    elif values.mean is not None:
        text.append(f"mean {number(values.mean)}, std {number(values.std)}")
        text.append(f"{number(values.min)} to {number(values.max)}")
    return "   ".join([*text, *([summary.not_finite] if values.nonfinite else [])])


def _images(part: "Figure | SubFigure", space: dict[str, float], view: View) -> None:
    rows = -(-len(view.pictures) // _COLUMNS)
    grid = part.add_gridspec(rows, _COLUMNS, **space, wspace=0.08, hspace=0.3)
    for i, (picture, caption) in enumerate(zip(view.pictures, view.captions, strict=True)):
        axes = part.add_subplot(grid[i // _COLUMNS, i % _COLUMNS])
        shown = picture[:, :, 0] if picture.shape[2] == 1 else picture
        axes.imshow(shown, cmap="gray", vmin=0, vmax=255)
        axes.set_axis_off()
        axes.set_title(_short(caption, 14), fontsize=7, color=_FAINT, pad=2)


def _panels(
    part: "Figure | SubFigure", space: dict[str, float], view: View, middle: tuple[int, ...]
) -> None:
    """Draw a slice of some samples on one colour scale, centred at 0 if there are two signs."""
    chosen = evenly(len(view.samples), _PANELS)
    slices = [_drawable(view.samples[i][middle]) for i in chosen]
    finite = np.concatenate([values[np.isfinite(values)] for values in slices])
    low, high = np.quantile(finite, [0.005, 0.995]) if finite.size else (0.0, 1.0)
    signs = low < 0 < high
    low, high = (-max(-low, high), max(-low, high)) if signs else (low, high)
    grid = part.add_gridspec(1, len(slices), wspace=0.1, **space)
    panels = [part.add_subplot(grid[0, i]) for i in range(len(slices))]
    for axes, sample, values in zip(panels, chosen, slices, strict=True):
        shown = axes.imshow(values, cmap="RdBu_r" if signs else "viridis", vmin=low, vmax=high)
        axes.set_axis_off()
        axes.set_title(_short(view.captions[sample], 16), fontsize=7, color=_FAINT, pad=3)
    part.colorbar(shown, ax=panels, fraction=0.03, pad=0.02)


def _curves(axes: "Axes", view: View) -> None:
    for sample in [view.samples[i] for i in evenly(len(view.samples), _CURVES)]:
        flat = _drawable(sample.reshape(-1))
        step = max(1, flat.size // 4096)
        axes.plot(np.arange(0, flat.size, step), flat[::step], lw=0.8, alpha=0.6, color=_COLOURS[0])
    axes.set_xlabel("position")
    axes.set_ylabel("value")
    axes.grid(axis="y")


def _histogram(axes: "Axes", view: View) -> None:
    """Draw shares and not counts, so that splits of different sizes can be compared."""
    lengths = view.field.variable
    arrays = {
        split: _drawable(values[np.isfinite(values)]) for split, values in view.values.items()
    }
    everything = np.concatenate([*arrays.values()])
    if not everything.size:
        axes.text(0.5, 0.5, "nothing finite", ha="center", color=_FAINT, transform=axes.transAxes)
        axes.set_axis_off()
        return
    low, high = float(everything.min()), float(everything.max())
    if lengths or not view.field.dtype.startswith("float"):
        width = math.ceil((high - low + 1) / _BINS)  # each bin has as many whole numbers
        bins = np.arange(low, high + width + 1, width) - 0.5
    else:
        bins = np.linspace(low, high, _BINS + 1) if low < high else np.array([low - 0.5, low + 0.5])
    for place, (split, values) in enumerate(arrays.items()):
        shares = 100 * np.histogram(values, bins)[0] / max(1, values.size)
        axes.stairs(shares, bins, fill=True, alpha=0.3, color=_colour(place), label=split)
    axes.set_xlabel("length" if lengths else "value")
    axes.set_ylabel("% of samples" if lengths or not view.field.shape else "% of values")
    axes.grid(axis="y")


def _classes(axes: "Axes", view: View) -> None:
    shares = {  # in percent, by split and value
        name: {value: 100 * count / s.count for value, count in s.values.classes.items()}
        for name, s in view.summaries.items()
        if s.values.classes
    }
    values = sorted({value for found in shares.values() for value in found})
    thick, rows = 0.8 / len(shares), np.arange(len(values))
    for place, (name, found) in enumerate(shares.items()):
        bars = np.array([found.get(value, 0) for value in values])
        if len(values) > _BARS:  # one curve for each split, the most frequent class first
            axes.stairs(np.sort(bars)[::-1], color=_colour(place), lw=1.2, label=name)
        else:
            at = rows - 0.4 + thick * (place + 0.5)
            axes.barh(at, bars, thick * 0.92, color=_colour(place), label=name)
    if len(values) > _BARS:
        axes.set_xlabel(f"{len(values):,} classes, the most frequent first")
        axes.set_ylabel("% of samples")
        return
    names = [_short(printable(class_name(v, view.categories)) or str(v), 22) for v in values]
    axes.set_yticks(rows, names)
    axes.set_ylim(len(values) - 0.4, -0.6)
    axes.set_xlabel("% of samples")


def _colour(place: int) -> str:
    return _COLOURS[place % len(_COLOURS)]


def _drawable(values: Array) -> Array:
    """Return float64 values small enough for matplotlib, which squares their differences."""
    return np.clip(values.astype(np.float64), -1e150, 1e150)


def _short(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"
