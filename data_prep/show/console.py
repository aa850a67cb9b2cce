"""Tables on stdout: with lines and colour on a terminal, plain columns for pipes and logs.

What is printed comes from files, so nothing in it is markup, and no control character gets
through.
"""

import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

NAMED = 30


def terminal() -> "Console":
    """Of a terminal."""
    from rich.console import Console

    return Console(markup=False, highlight=False, emoji=False)


def title(text: str) -> None:
    """Print what comes next."""
    print()
    say(text, style="bold")


def say(text: str, style: str = "") -> None:
    """Print a line."""
    if sys.stdout.isatty():
        terminal().print(_shown(text), style=style, soft_wrap=True)
    else:
        print(_shown(text))


def show(columns: Sequence[str], rows: Sequence[Sequence[object]], numbers: str = "") -> None:
    """Print a table.

    Args:
        columns: Their names; none: without a header.
        rows: Of as many cells; None is empty.
        numbers: The columns that are set to the right, by name, separated by spaces.
    """
    if not rows:
        return
    cells = [["" if cell is None else _shown(str(cell)) for cell in row] for row in rows]
    right = [column in numbers.split() for column in columns] or [False] * len(cells[0])
    if not sys.stdout.isatty():
        lines = [[*columns], *cells] if columns else cells
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        for line in lines:
            parts = zip(line, widths, right, strict=True)
            text = "  ".join(c.rjust(width) if r else c.ljust(width) for c, width, r in parts)
            print(text.rstrip())
        return
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, show_header=bool(columns), show_edge=False)
    for name, is_right in zip(columns or [""] * len(right), right, strict=True):
        table.add_column(name, justify="right" if is_right else "left", overflow="fold")
    for row in cells:
        table.add_row(*row)
    terminal().print(table)


def printable(text: str) -> str:
    r"""Text with its control characters written out: a newline as \n."""
    if text.isprintable():
        return text
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text
    )


def _shown(text: str) -> str:
    """As far as the encoding of stdout goes: not every job has UTF-8."""
    encoding = sys.stdout.encoding or "utf-8"
    return printable(text).encode(encoding, "replace").decode(encoding)


def number(value: float | int | None) -> str:
    """Four digits of a statistic, or all of a whole number."""
    if value is None:
        return "-"
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def listed(names: Iterable[str]) -> str:
    """`a, b, c`; of a thousand the first few."""
    found = list(names)
    more = f", … ({len(found):,} in all)" if len(found) > NAMED else ""
    return ", ".join(found[:NAMED]) + more


def size(nbytes: int) -> str:
    """A size, in a unit that fits."""
    amount, units = float(nbytes), ["bytes", "kB", "MB", "GB", "TB", "PB"]
    while amount >= 1000 and len(units) > 1:
        amount /= 1000
        units.pop(0)
    return f"{amount:.0f} bytes" if units[0] == "bytes" else f"{amount:.1f} {units[0]}"
