"""A plot of text: each character has 2 x 4 dots of braille."""

import math
from collections.abc import Iterator, Sequence

from rich.text import Text

from hpctrain.report.views.curves import Numbers
from hpctrain.terminal import printable

_COLOURS = ("cyan", "yellow", "magenta", "green", "red", "blue")
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
_MARGIN = 11  # characters of the scale


def draw(
    title: str,
    curves: Sequence[tuple[str, Numbers, Numbers]],
    width: int,
    height: int,
    logarithmic: bool,
) -> Text:
    """Return the plot of some curves (name, steps, values), with `height` lines without its title.

    On a logarithmic axis, values that are not positive are left out.
    """
    points = [
        (curve_x, math.log10(y) if logarithmic else y, number)
        for number, (_, xs, ys) in enumerate(curves)
        for curve_x, y in zip(xs.tolist(), ys.tolist(), strict=True)
        if math.isfinite(y) and (y > 0 or not logarithmic)
    ]
    text = Text(printable(title), "bold")
    if not points:
        return text.append("\n  no value that can be drawn\n", "dim")
    low_x, high_x = min(p[0] for p in points), max(p[0] for p in points)
    low, high = min(p[1] for p in points), max(p[1] for p in points)
    across, down = 2 * (width - _MARGIN) - 1, 4 * height - 1
    dots: dict[tuple[int, int], tuple[int, int]] = {}
    before: tuple[int, int, int] | None = None
    for x, y, number in points:
        column = round((x - low_x) / ((high_x - low_x) or 1) * across)
        row = down - round((y - low) / ((high - low) or 1) * down)
        start = before if before is not None and before[2] == number else (column, row, number)
        for at_column, at_row in _line(start[:2], (column, row)):
            place = at_row // 4, at_column // 2
            dots[place] = dots.get(place, (0, 0))[0] | _DOTS[at_row % 4][at_column % 2], number
        before = column, row, number
    for row in range(height):
        value = high - (high - low) * row / max(1, height - 1)
        shown = 10**value if logarithmic else value
        labelled = row in (0, height // 2, height - 1)
        text.append(f"\n{shown:>9.4g} ┤" if labelled else f"\n{'':>9} │", "dim")
        for column in range(width - _MARGIN):
            mask, number = dots.get((row, column), (0, 0))
            text.append(chr(0x2800 + mask) if mask else " ", _COLOURS[number % len(_COLOURS)])
    scale = f"{low_x:g}"
    text.append(f"\n{'':>9} └{scale}{high_x:>{max(1, width - _MARGIN - len(scale))}g}\n", "dim")
    if len(curves) > 1:
        for number, (name, _, _) in enumerate(curves):
            text.append(f"{'':>11}━ {printable(name)}\n", _COLOURS[number % len(_COLOURS)])
    return text


def _line(start: tuple[int, int], end: tuple[int, int]) -> Iterator[tuple[int, int]]:
    """Yield the dots (column, row) of a straight line, with both of its ends."""
    length = max(abs(end[0] - start[0]), abs(end[1] - start[1]), 1)
    for part in range(length + 1):
        yield (
            round(start[0] + (end[0] - start[0]) * part / length),
            round(start[1] + (end[1] - start[1]) * part / length),
        )
