"""Draw one field of a data set: some samples on the left, the distribution on the right."""

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from data_prep.datasets.dataset import evenly
from data_prep.show.console import number
from data_prep.show.summary import Summary, class_name, not_finite
from data_prep.show.views import View
from hpctrain.shards.types import Array
from hpctrain.terminal import printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

COLUMNS = 8  # images in a row
_PANELS = 4  # the most slices
_CURVES = 12  # the most curves
_BARS = 30  # the most classes that have bars
WIDTH = 11.0  # inches
_COLOURS = ("#2f6db5", "#e58634", "#3c9d6c", "#a05bb0", "#c8485c", "#6f7681")
INK, FAINT = "#22272e", "#8a929c"
STYLE: Any = {
    "font.family": "sans-serif",
    "font.size": 8.5,
    "text.parse_math": False,  # names may contain a $
    "text.color": INK,
    "axes.edgecolor": "#c3c8ce",
    "axes.labelcolor": FAINT,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": False,
    "axes.axisbelow": True,
    "xtick.color": FAINT,
    "ytick.color": FAINT,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "grid.color": "#e8eaed",
}


def height(view: View) -> float:
    """Return the height of the drawing in inches."""
    if view.pictures:
        return 1.1 + 0.8 * -(-len(view.pictures) // COLUMNS)
    bars = [len(s.classes) for s in view.summaries.values() if s.classes]
    return 1.3 + 0.17 * max(bars) if bars and 6 <= max(bars) <= _BARS else 2.7


def draw(part: "Figure | SubFigure", view: View) -> None:
    """Draw a field into a figure whose height is `height(view)`."""
    inches = height(view)
    top, bottom, title = 1 - 0.65 / inches, 0.5 / inches, 1 - 0.22 / inches
    first = next(iter(view.summaries.values()))
    part.text(0.045, title, view.name, fontsize=11, fontweight="bold", va="center")
    part.text(0.955, title, _described(first), color=FAINT, va="center", ha="right")
    left, shape = 0.16 if first.classes else 0.09, view.field.shape
    if view.pictures or view.samples:
        left = 0.65
        space = {"left": 0.045, "right": 0.57, "top": top, "bottom": 0.2 / inches}
        note = f"above each: its {view.label or 'number'}"
        if view.pictures:
            _images(part, space, view)
        elif len(shape) > 1 and min(shape[-2:]) > 1:
            middle = tuple(size // 2 for size in shape[:-2])
            _panels(part, space, view, middle)
            note += f", slice {list(middle)}" if middle else ""
        else:
            place = part.add_gridspec(left=0.075, right=0.57, top=top, bottom=bottom)
            _curves(part.add_subplot(place[0]), view)
            note = f"{min(_CURVES, len(view.samples))} samples"
        part.text(0.045, 1 - 0.4 / inches, note, fontsize=7.5, color=FAINT, va="center")
    place = part.add_gridspec(left=left, right=0.955, top=top, bottom=bottom)
    axes = part.add_subplot(place[0])
    if any(summary.classes for summary in view.summaries.values()):
        _classes(axes, view)
    else:
        _histogram(axes, view)
    if len(view.summaries) > 1 and axes.get_legend_handles_labels()[0]:
        place_above: Any = {"loc": "lower right", "bbox_to_anchor": (1.01, 0.98), "ncols": 6}
        look: Any = {"frameon": False, "fontsize": 8, "handlelength": 1.0, "columnspacing": 1.2}
        axes.legend(**place_above, **look)


def _described(summary: Summary) -> str:
    text = [str(summary.field)]
    if summary.lengths:
        low, high = summary.lengths["min"], summary.lengths["max"]
        text.append(f"lengths {number(low)} to {number(high)}")
    elif summary.mean is not None:
        text.append(f"mean {number(summary.mean)}, std {number(summary.std)}")
        text.append(f"{number(summary.min)} to {number(summary.max)}")
    if summary.nonfinite:
        text.append(not_finite(summary))
    return "   ".join(text)


def _images(part: "Figure | SubFigure", space: dict[str, float], view: View) -> None:
    rows = -(-len(view.pictures) // COLUMNS)
    grid = part.add_gridspec(rows, COLUMNS, **space, wspace=0.08, hspace=0.3)
    for i, (picture, caption) in enumerate(zip(view.pictures, view.captions, strict=True)):
        axes = part.add_subplot(grid[i // COLUMNS, i % COLUMNS])
        smooth = "nearest" if max(picture.shape[:2]) <= 64 else "antialiased"
        if picture.shape[2] == 1:
            axes.imshow(picture[:, :, 0], cmap="gray", vmin=0, vmax=255, interpolation=smooth)
        else:
            axes.imshow(picture, interpolation=smooth)
        axes.set_axis_off()
        axes.set_title(_short(caption, 14), fontsize=7, color=FAINT, pad=2)


def _panels(
    part: "Figure | SubFigure", space: dict[str, float], view: View, middle: tuple[int, ...]
) -> None:
    """Draw a slice of some samples on one colour scale, centred at 0 if there are two signs."""
    from matplotlib import colormaps

    chosen = evenly(len(view.samples), _PANELS)
    slices = [_drawable(view.samples[i][middle]) for i in chosen]
    finite = np.concatenate([values[np.isfinite(values)] for values in slices])
    low, high = np.quantile(finite, [0.005, 0.995]) if finite.size else (0.0, 1.0)
    cmap = colormaps["RdBu_r" if low < 0 < high else "viridis"].with_extremes(bad="#d4d7db")
    if low < 0 < high:
        high = max(-low, high)
        low = -high
    count = len(slices)
    grid = part.add_gridspec(1, count + 1, width_ratios=[*[1.0] * count, 0.06], wspace=0.1, **space)
    for i, (sample, values) in enumerate(zip(chosen, slices, strict=True)):
        axes = part.add_subplot(grid[0, i])
        shown = axes.imshow(values, cmap=cmap, vmin=low, vmax=high, interpolation="nearest")
        axes.set_axis_off()
        axes.set_title(_short(view.captions[sample], 16), fontsize=7, color=FAINT, pad=3)
    bar = part.add_subplot(grid[0, count])
    part.colorbar(shown, cax=bar)
    bar.set_box_aspect(_box_aspect(axes, bar, values.shape))
    bar.tick_params(labelsize=7, length=2)


def _box_aspect(axes: "Axes", bar: "Axes", shape: tuple[int, ...]) -> float:
    """Return the aspect of a colour bar that is as high as the images beside it."""
    wide = axes.get_position().width / bar.get_position().width
    return wide * shape[0] / shape[1]


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
    from matplotlib.ticker import MaxNLocator

    lengths = view.field.variable
    arrays = {
        split: _drawable(values[np.isfinite(values)]) for split, values in view.values.items()
    }
    everything = np.concatenate([*arrays.values()])
    if not everything.size:
        axes.text(0.5, 0.5, "nothing finite", ha="center", color=FAINT, transform=axes.transAxes)
        axes.set_axis_off()
        return
    low, high = float(everything.min()), float(everything.max())
    whole = lengths or not view.field.dtype.startswith("float")
    logarithmic = lengths and low >= 1 and high / low > 100
    if logarithmic:
        bins = np.unique(np.geomspace(low, high + 1, 50).round())
    elif whole and high - low <= 80:
        bins = np.arange(low, high + 2) - 0.5
    elif whole:
        width = math.ceil((high - low + 1) / 60)  # each bin has the same number of whole numbers
        bins = np.arange(low, high + width + 1, width) - 0.5
    elif low == high:
        bins = np.array([low - 0.5, low + 0.5])
    else:
        bins = np.linspace(low, high, 61)
    tallest: list[float] = []
    for (split, values), colour in zip(arrays.items(), _colours(len(arrays)), strict=True):
        counts, _ = np.histogram(values, bins)
        shares = 100 * counts / max(1, values.size)
        axes.stairs(shares, bins, fill=True, alpha=0.22, color=colour)
        axes.stairs(shares, bins, color=colour, lw=1.2, label=split)
        tallest += shares[shares > 0].tolist()
    if logarithmic:
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.xaxis.set_minor_formatter("")
    elif whole:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if tallest and max(tallest) > 200 * float(np.median(tallest)):
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:g}")
    axes.set_xlabel("length" if lengths else "value")
    axes.set_ylabel("% of samples" if lengths or not view.field.shape else "% of values")
    axes.grid(axis="y")


def _classes(axes: "Axes", view: View) -> None:
    splits = {name: s for name, s in view.summaries.items() if s.classes}
    values = sorted({value for s in splits.values() for value in s.classes or {}})
    shares = {
        name: np.array([100 * (s.classes or {}).get(value, 0) / s.count for value in values])
        for name, s in splits.items()
    }
    colours = _colours(len(shares))
    if len(values) > _BARS:  # one curve for each split, the most frequent class first
        for (name, heights), colour in zip(shares.items(), colours, strict=True):
            axes.stairs(np.sort(heights)[::-1], color=colour, lw=1.2, label=name)
        axes.set_xlabel(f"{len(values):,} classes, the most frequent first")
        axes.set_ylabel("% of samples")
        axes.grid(axis="y")
        return
    thick = 0.8 / len(shares)
    rows = np.arange(len(values))
    for i, ((name, heights), colour) in enumerate(zip(shares.items(), colours, strict=True)):
        axes.barh(rows - 0.4 + thick * (i + 0.5), heights, thick * 0.92, color=colour, label=name)
    names = [_short(printable(class_name(v, view.categories)) or str(v), 22) for v in values]
    axes.set_yticks(rows, names)
    axes.set_ylim(len(values) - 0.4, -0.6)
    axes.set_xlim(0, 1.25 * max(float(heights.max()) for heights in shares.values()))
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel("% of samples")
    axes.grid(axis="x")


def _colours(count: int) -> list[str]:
    return [_COLOURS[i % len(_COLOURS)] for i in range(count)]


def _drawable(values: Array) -> Array:
    """Return float64 values small enough for matplotlib, which squares their differences."""
    return np.clip(values.astype(np.float64), -1e150, 1e150)


def _short(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"
