"""rich's console and tables for text of strangers: neither read as markup nor obeyed.

console = Console()
table = Table("run", "state")
table.add_row(name, Cell("failed", "red"))  # a name with ESC or [bold] is shown as it is written
console.print(table)

A line breaks only between words. A word that is longer than the terminal, such as a path, is left
to the terminal, so that it can be copied. In a file or a pipe no line breaks, unless the variable
COLUMNS gives it a width.
"""

import json
import math
import os
import re
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from itertools import zip_longest
from typing import Any

from rich.cells import cell_len, set_cell_size
from rich.console import Console as RichConsole
from rich.console import ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from hpctrain.base.terminal.terminal import harmless, indented, printable, unguarded

# --json of -m, which Hydra stands between: one object on standard output says what was done.
AS_JSON: ContextVar[bool] = ContextVar("as_json", default=False)
_NO_EDGE = 100_000  # the width of a file or a pipe, in characters
_SHORT = 24  # a text of so many characters stays on one line: `3 h 20 min`
_GAP = 2  # blanks between two columns
_WORD = re.compile(r"\s*\S+\s*")


class Console(RichConsole):
    """A console on stdout or stderr, with the other options of rich's."""

    def __init__(self, *, stderr: bool = False, **options: Any) -> None:
        stream = unguarded(sys.stderr if stderr else sys.stdout)
        super().__init__(file=stream, markup=False, emoji=False, **options)
        known = "width" in options or os.environ.get("COLUMNS", "").isdigit()
        if not (known or self.is_terminal):
            self.width = _NO_EDGE

    def print(self, *objects: Any, **options: Any) -> None:
        """Print with the options of rich; words that are longer than the terminal stay whole."""
        super().print(*objects, **{"crop": False} | options)

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """Yield the segments of a renderable. Only rich's own control segments have commands."""
        if isinstance(renderable, Text) and renderable.overflow is None:
            used = options or self.options
            if not used.no_wrap:
                renderable = _whole(renderable, wrapped(renderable, used.max_width))
        for segment in super().render(renderable, options):
            shown = segment.text if segment.control else harmless(segment.text)
            yield segment if shown == segment.text else Segment(shown, segment.style)


class Cell(Text):
    """A foreign text on one line, for a table. It is escaped before rich measures it."""

    def __init__(self, content: str = "", style: str = "", **options: Any) -> None:
        super().__init__(printable(content), style, **options)


class Table:
    """Rows of cells below titles, without rules. Empty columns are left out.

    Long texts are folded between words, those with `no_wrap` never. If the columns then do not fit
    side by side, those in `first_out` are left out, and lines are longer than the terminal.

    Args:
        *titles: The titles of the columns; if all are empty, no title is shown.
        title: What stands above the table.
        right: The numbers of the columns that are aligned to the right.
        first_out: The numbers of columns that may be left out, that of the least worth first.
    """

    def __init__(
        self,
        *titles: str,
        title: str = "",
        right: Collection[int] = (),
        first_out: Sequence[int] = (),
    ) -> None:
        self._title, self._right, self._first_out = title, right, first_out
        self._rows: list[Sequence[Text]] = []
        self._titles: Sequence[Text] = [Cell(each, "bold") for each in titles]

    def add_row(self, *cells: str | Text) -> None:
        """Add a row; a `str` is shown on one line."""
        self._rows.append([Cell(cell) if isinstance(cell, str) else cell for cell in cells])

    def shown(self, width: int) -> list[int]:
        """Return the numbers of the columns that are shown in so many characters."""
        return [*self._sizes(width)]

    def __rich_console__(self, console: RichConsole, options: ConsoleOptions) -> Iterator[Text]:
        """Yield the lines of the table."""
        if self._title:
            yield Text(printable(self._title), "italic")
        widths = self._widths(options.max_width)
        for row in self._lines():
            cells = [wrapped(row[n], width) for n, width in widths.items()]
            for parts in zip_longest(*cells, fillvalue=Text()):
                line = Text()
                for part, (n, width) in zip(parts, widths.items(), strict=True):
                    blanks = Text(" " * (width - part.cell_len))
                    line.append_text(blanks + part if n in self._right else part + blanks)
                    line.append(" " * _GAP)
                line.rstrip()
                yield _whole(line, [line])

    def _lines(self) -> list[Sequence[Text]]:
        titled = any(title.plain for title in self._titles)
        return [self._titles, *self._rows] if titled else self._rows

    def _sizes(self, width: int) -> dict[int, tuple[int, int]]:
        """Return the least and the greatest width of each column that is shown."""
        sizes = {
            n: (max(map(_least, cells)), max(map(_longest, cells)))
            for n, cells in enumerate(zip(*self._lines(), strict=True))
            if any(row[n].plain for row in self._rows)
        }
        for n in self._first_out:
            if n in sizes and _spare(sizes, width) < 0:
                del sizes[n]
        return sizes

    def _widths(self, width: int) -> dict[int, int]:
        """Return the width of each column; what is left over goes to those that lack least."""
        sizes = self._sizes(width)
        spare, found = _spare(sizes, width), {n: least for n, (least, _) in sizes.items()}
        for n, (least, longest) in sorted(sizes.items(), key=lambda item: item[1][1] - item[1][0]):
            more = max(0, min(spare, longest - least))
            found[n], spare = least + more, spare - more
        return found


def _spare(sizes: Mapping[int, tuple[int, int]], width: int) -> int:
    """Return the characters that columns of the least width leave; negative if they do not fit."""
    return width + _GAP - sum(least + _GAP for least, _ in sizes.values())


def wrapped(text: Text, width: int) -> list[Text]:
    """Return the lines of a text; they are longer than `width` only where a word is."""
    if text.no_wrap:
        return [text]
    lines = []
    for line in text.split(allow_blank=True):
        offsets, used = [], 0
        for word in _WORD.finditer(line.plain):
            if used and used + cell_len(word[0].rstrip()) > width:
                offsets.append(word.start())
                used = 0
            used += cell_len(word[0])
        for part in line.divide(offsets):
            part.rstrip()
            lines.append(part)
    return lines


def shortened(text: str, width: int) -> str:
    """Return the text with at most so many characters of the terminal; it is cut between words."""
    if cell_len(text) <= width:
        return text
    cut = set_cell_size(text, max(1, width - 4))
    return f"{cut.rpartition(' ')[0] or cut} ..."


def _whole(text: Text, lines: list[Text]) -> Text:
    """Return the lines as a text that rich neither wraps nor cuts."""
    return Text("\n", no_wrap=True, overflow="ignore", end=text.end).join(lines)


def _least(text: Text) -> int:
    if text.no_wrap:
        return _longest(text)
    words = [cell_len(word.strip()) for word in _WORD.findall(text.plain)]
    return max([min(_longest(text), _SHORT), *words])


def _longest(text: Text) -> int:
    return max(cell_len(line) for line in text.plain.split("\n"))


def print_json(value: Any) -> None:
    """Print a value as JSON; a number that is not finite, which JSON lacks, becomes null."""
    print(json.dumps(_finite(value)), flush=True)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def say(text: str, style: str = "") -> None:
    """Print a line on standard error."""
    Console(stderr=True, soft_wrap=True).print(Text(indented(text), style))
