"""The text of CSV files as UTF-8, the only encoding that Arrow reads.

The encoding is that of the byte order mark, as Excel writes it for UTF-16, or else that of
--encoding, or else UTF-8.
"""

import codecs
import io
from typing import BinaryIO

from data_prep.formats.files import Part
from data_prep.formats.opening import opened
from hpctrain.errors import ConfigError, DataError

# UTF-32 comes first: its mark begins with that of UTF-16.
_MARKS = {
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
    codecs.BOM_UTF8: "utf-8",
}
ASCII = bytes(range(128))
CURE = "--encoding NAME gives the encoding, such as cp1252 (Excel's); latin-1 takes any bytes"


class NotTextError(Exception):
    """A byte is not possible in the encoding of the file."""


def check_encoding(name: str) -> str:
    """Return the standard name of an encoding that --encoding gives; "" stays ""."""
    try:
        "a".encode(name or "utf-8")
    except (LookupError, UnicodeError):
        raise ConfigError(
            f"--encoding {name}: there is no such encoding; utf-8, utf-16, cp1252, latin-1 and "
            "others that Python has are allowed"
        ) from None
    found = codecs.lookup(name).name if name else ""
    return "utf-8" if found == "utf-8-sig" else found


def encoding_of(path: str, given: str) -> str:
    """Return the encoding of a file; `given` is used if it has no byte order mark."""
    with opened(Part(path)) as stream:
        head = stream.read(4)
    for mark, encoding in _MARKS.items():
        if head.startswith(mark):
            return encoding
    if given in ("utf-16", "utf-32"):
        raise DataError(
            f"{path} has no byte order mark, which {given} needs; --encoding {given}-le (or "
            f"{given}-be) reads text without one"
        )
    return given or "utf-8"


def ends_lines_with_one_byte(encoding: str) -> bool:
    """Return whether the byte 10 always ends a line, so that a file may be cut there."""
    try:
        return ASCII.decode(encoding) == ASCII.decode("ascii")
    except UnicodeDecodeError:
        return False


def first_line(path: str, given: str, most: int) -> bytes:
    """Return the bytes of the first line, at most `most`."""
    with opened(Part(path)) as stream:
        line = stream.readline(most)
    if b"\0" in line and not given and not line.startswith(tuple(_MARKS)):
        order = "le" if line.find(b"\0") % 2 else "be"
        raise DataError(
            f"{path} has zero bytes in its first line, as UTF-16 without a byte order mark has; "
            f"--encoding utf-16-{order} reads it"
        )
    return line


class Utf8(io.RawIOBase):
    """The text of a stream as UTF-8 without byte order mark.

    Args:
        stream: The bytes of the file.
        encoding: Their encoding.
        start: Where the stream begins in the file, for messages.

    Attributes:
        quotes: The number of quotes so far: Arrow accepts a quote that is still open at the end.
    """

    def __init__(self, stream: BinaryIO, encoding: str, start: int = 0) -> None:
        self._stream, self._encoding, self.quotes = stream, encoding, 0
        self._decoder = codecs.getincrementaldecoder(encoding)()
        self._left, self._at = b"", start  # UTF-8 that waits, and the place in the file

    def readable(self) -> bool:
        """Return True."""
        return True

    def read(self, size: int = -1, /) -> bytes:
        """Return exactly `size` bytes, or fewer at the end."""
        held, more = [self._left], True
        count = len(self._left)
        while count < size and more:
            raw = self._stream.read(size)
            if not self._at and self._encoding == "utf-8":
                raw = raw.removeprefix(codecs.BOM_UTF8) or self._stream.read(size)
            more = bool(raw)
            held.append(self._utf8(raw))
            count += len(held[-1])
        content = b"".join(held)
        content, self._left = content[:size], content[size:]
        self.quotes += content.count(b'"')
        return content

    def _utf8(self, raw: bytes) -> bytes:
        waiting = self._decoder.getstate()[0]
        if raw.isascii() and not waiting and self._encoding == "utf-8":
            self._at += len(raw)
            return raw
        try:
            text = self._decoder.decode(raw, final=not raw)
        except UnicodeDecodeError as error:
            place = self._at - len(waiting) + error.start
            raise NotTextError(f"byte {place:,} is 0x{error.object[error.start]:02x}") from None
        except UnicodeError as error:  # some encodings name no byte
            raise NotTextError(f"{error}") from None
        self._at += len(raw)
        return raw if self._encoding == "utf-8" else text.encode()
