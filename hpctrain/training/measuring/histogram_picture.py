"""A picture of histograms: a row for each parameter, and colours for how many of its values.

blocks.0.weight    ░░▒▓██▓▒░
blocks.1.weight    ░░▒▒▓██▓▒░        2^-20 ... 2^0
"""

from __future__ import annotations

from typing import Any

_ROWS = 80  # a picture with more cannot be read


def picture(rows: dict[str, dict[str, Any]], title: str, lowest: int) -> Any:
    """Return a figure of matplotlib.

    The rows are by name, as `hpctrain.training.measuring.histograms` writes them. If there are too
    many, those of a module are added up. `lowest` is the power of two of the first bin.
    """
    from matplotlib.figure import Figure  # without pyplot, which would keep the figure

    sizes, nonfinite = _grouped(rows)
    filled = [i for counts in sizes.values() for i, n in enumerate(counts) if n]
    first, last = min(filled, default=0), max(filled, default=0)
    figure = Figure(figsize=(9, 1.6 + 0.2 * len(sizes)), layout="constrained")
    axes = figure.subplots()
    shares = [
        [n / max(1, sum(counts)) for n in counts[first : last + 1]] for counts in sizes.values()
    ]
    edges = (lowest + first - 1, lowest + last)
    image = axes.imshow(
        shares,
        cmap="viridis",
        aspect="auto",
        interpolation="nearest",
        extent=(*edges, len(sizes) - 0.5, -0.5),
    )
    names = [f"{n} ({nonfinite[n]} not finite)" if nonfinite[n] else n for n in sizes]
    axes.set_yticks(range(len(names)), names, fontsize=7)
    axes.set(title=title, xlabel="size of the values, as a power of 2 (without zeros)")
    for label, name in zip(axes.get_yticklabels(), sizes, strict=True):
        label.set_color("red" if nonfinite[name] else "black")
    figure.colorbar(image, ax=axes, label="part of the values")
    return figure


def _grouped(rows: dict[str, dict[str, Any]]) -> tuple[dict[str, list[int]], dict[str, int]]:
    """Return the counts by power of two, and those that are not finite, in at most _ROWS rows."""
    depth = max((name.count(".") + 1 for name in rows), default=1)
    while depth > 1 and len({_head(name, depth) for name in rows}) > _ROWS:
        depth -= 1
    sizes: dict[str, list[int]] = {}
    nonfinite: dict[str, int] = {}
    for name, row in rows.items():
        group = _head(name, depth)
        both = [n + p for n, p in zip(row["negative"], row["positive"], strict=True)]
        sizes[group] = [a + b for a, b in zip(sizes.get(group, [0] * len(both)), both, strict=True)]
        nonfinite[group] = nonfinite.get(group, 0) + row["nonfinite"]
    return sizes, nonfinite


def _head(name: str, depth: int) -> str:
    return ".".join(name.split(".")[:depth])
