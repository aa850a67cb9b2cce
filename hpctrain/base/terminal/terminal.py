r"""Text of strangers on the terminal: it is shown, and it never commands the terminal.

    a run's name, a log line, a tar member, a key of a JSON file
        ├── print, argparse, tracebacks ── Guard (stdout and stderr of every command) ──┐
        ├── rich ───────────────────────── console.Console ────────────────────┤─ terminal
        └── logging ────────────────────── secrets.mask_logging ───────────────┘

A terminal obeys control characters: ESC ]52 writes the clipboard, ESC [8m hides text, BEL rings, a
carriage return overwrites the line, and the bidirectional controls of Unicode change the order in
which code is read (CVE-2021-42574). All of them are shown as Python writes them: `\x1b`. A value
that belongs on one line also has its newlines and tabs escaped (`printable`).
"""

import codecs
import io
import re
import sys
from collections.abc import Callable, Iterable
from typing import IO, Any, TextIO, cast

# C0 but tab and newline, DEL, C1; marks of direction; separators of lines; halves of surrogates.
_COMMANDS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)
_COLOURS = re.compile(r"\x1b\[[0-9;:]*m")


def harmless(text: str) -> str:
    r"""Return the text with every control character escaped, but newlines and tabs."""
    return _COMMANDS.sub(_escaped, text)


def printable(text: str) -> str:
    r"""Return the text as one line with everything escaped that is not seen: a newline as \n."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def few(names: Iterable[object], most: int = 5, between: str = ", ") -> str:
    """Return the first names, and how many more there are: `a, b and 3 more`."""
    found = [*map(str, names)]
    if len(found) <= most:
        return between.join(found)
    return f"{between.join(found[:most])}{between.rstrip(', ')} and {len(found) - most:,} more"


def indented(text: str) -> str:
    """Return the text of an error with its further lines indented.

    So a newline in a value that it quotes begins no line that looks like another message.
    """
    return harmless(text).replace("\n", "\n  ")


class Guard:
    """A text stream on which print writes only harmless text; everything else is the stream's."""

    def __init__(self, stream: IO[str]) -> None:
        self.unguarded = stream

    def write(self, text: str) -> int:
        """Write the text with its control characters escaped."""
        self.unguarded.write(harmless(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write lines."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.unguarded, name)


def guard() -> None:
    """Guard stdout and stderr of this process."""
    sys.stdout, sys.stderr = (cast(TextIO, Guard(unguarded(s))) for s in (sys.stdout, sys.stderr))


def unguarded(stream: IO[str]) -> IO[str]:
    """Return the stream that `stream` guards, or `stream` itself."""
    found: IO[str] = getattr(stream, "unguarded", stream)
    return found


def exact() -> IO[str]:
    """Return the stream for a text that files and pipes get as it is; a terminal is guarded."""
    return sys.stdout if sys.stdout.isatty() else unguarded(sys.stdout)


def bytes_writer() -> Callable[[bytes], None]:
    """Return a function that writes the bytes of a foreign text to stdout.

    A file or a pipe gets the bytes as they are. On a terminal, colours are left out, a carriage
    return begins a new line, and other control characters are escaped.
    """
    if not sys.stdout.isatty():
        raw = sys.stdout.buffer
        return lambda block: _written(raw, block)
    decoder = io.IncrementalNewlineDecoder(codecs.getincrementaldecoder("utf-8")("replace"), True)
    out = unguarded(sys.stdout)
    return lambda block: _written(out, harmless(_COLOURS.sub("", decoder.decode(block))))


def _written(stream: IO[Any], content: Any) -> None:
    stream.write(content)
    stream.flush()


def _escaped(match: re.Match[str]) -> str:
    return match[0].encode("unicode_escape").decode()
