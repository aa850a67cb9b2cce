"""Tables and lines on stdout.

The text comes from files. So it is never read as markup, and control characters are escaped.
"""

import sys
from collections.abc import Sequence

from hpctrain.base.terminal.terminal import printable


def title(text: str) -> None:
    """Print an empty line and a heading."""
    print()
    say(text)


def say(text: str) -> None:
    """Print a line."""
    print(_shown(text))


def show(columns: Sequence[str], rows: Sequence[Sequence[object]], numbers: str = "") -> None:
    """Print a table."""
    if not rows:
        return
    from hpctrain.base.terminal.console import Console, Table

    right = [n for n, name in enumerate(columns) if name in numbers.split()]
    table = Table(*(columns or [""] * len(rows[0])), right=right)
    for row in rows:
        table.add_row(*("" if cell is None else _shown(str(cell)) for cell in row))
    Console(highlight=False).print(table)


def _shown(text: str) -> str:
    """Return the text as stdout can print it: in some jobs its encoding is not UTF-8."""
    encoding = sys.stdout.encoding or "utf-8"
    return printable(text).encode(encoding, "replace").decode(encoding)


def number(value: float | int | None) -> str:
    """Return a statistic with four digits, or a whole number with all its digits."""
    if value is None:
        return "-"
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def size(nbytes: int) -> str:
    """Return a size in bytes as text in a suitable unit."""
    amount, units = float(nbytes), ["bytes", "kB", "MB", "GB", "TB", "PB"]
    while amount >= 1000 and len(units) > 1:
        amount /= 1000
        units.pop(0)
    return f"{amount:.0f} bytes" if units[0] == "bytes" else f"{amount:.1f} {units[0]}"
