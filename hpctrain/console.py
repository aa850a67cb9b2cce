"""rich's console for text of strangers: it is neither read as markup nor obeyed by the terminal.

console = Console()
table.add_row(Cell(name))      # a name with ESC or [bold] is shown as it is written
console.print(table)
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable
from typing import Any

from rich.console import Console as RichConsole
from rich.console import ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from hpctrain.terminal import harmless, printable, unguarded


class Console(RichConsole):
    """A console on stdout or stderr.

    Args:
        stderr: Whether it is on stderr.
        **options: Other options of rich's console.
    """

    def __init__(self, *, stderr: bool = False, **options: Any) -> None:
        stream = unguarded(sys.stderr if stderr else sys.stdout)
        super().__init__(file=stream, markup=False, emoji=False, **options)

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """Yield the segments of a renderable. Only rich's own control segments have commands."""
        for segment in super().render(renderable, options):
            shown = segment.text if segment.control else harmless(segment.text)
            yield segment if shown == segment.text else Segment(shown, segment.style)


class Cell(Text):
    """A foreign text on one line, for a table. It is escaped before rich measures it."""

    def __init__(self, content: str = "", style: str = "", **options: Any) -> None:
        super().__init__(printable(content), style, **options)


def print_json(value: Any) -> None:
    """Print a value as JSON; a number that is not finite, which JSON lacks, becomes null."""
    print(json.dumps(_finite(value)), flush=True)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
