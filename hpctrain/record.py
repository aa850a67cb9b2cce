"""Records: what we read from a file is checked once, here, and has a type from then on.

    path ── disk.open_regular ── bytes ── decode ── a frozen Record ── its readers
            no link, a file,                └── DamageError: the file, the place in it, what
            at most LARGEST bytes               stands there, and what may

    class Sale(Record, frozen=True):
        time: Time
        price: Finite = 0.0
        tags: tuple[str, ...] = ()
        prices: dict[str, float] = msgspec.field(default_factory=dict)

    read(Sale, run / "shop" / "sale.json", parts=2)    a Sale
    read(dict[str, Sale], run / "sales.json")          any type that msgspec knows

An unknown key, which a newer version may have written, is skipped; a class that has every key of
its file (`Record.WHOLE`) says so once. A key of an older version is
translated by `Record.upgraded`. Files of before have NaN and Infinity, which are no JSON: they are
read where any `float` may stand, and are errors where `Finite` or a type made of it stands.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import re
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import msgspec
from msgspec import Meta

from hpctrain.disk import open_regular
from hpctrain.errors import DamageError

T = TypeVar("T")
log = logging.getLogger(__name__)

_WORDS: dict[str, str] = {}


def matching(pattern: str, words: str) -> Meta:
    """Return the constraint of a text.

    Args:
        pattern: The regular expression that all of the text matches.
        words: What such a text is, for errors.
    """
    whole = rf"^(?:{pattern})\Z"
    _WORDS[repr(whole)] = words
    return Meta(pattern=whole)


Finite = Annotated[float, Meta(ge=-1.7e308, le=1.7e308)]
Count = Annotated[int, Meta(ge=0, le=2**53)]  # a step, bytes, ranks
Seconds = Annotated[float, Meta(ge=-1e12, le=1e12)]  # below 0 where two clocks differ
Time = Annotated[float, Meta(ge=-1e11, le=2e11)]  # since the epoch; datetime ends in the year 9999
Number = float | Literal["nan", "inf", "-inf"]  # a metric: JSON has no word for these
JobId = Annotated[str, matching("([0-9]+(_[0-9]+)?)?", "a job id such as 123_4, or empty")]

_NUL = re.compile(rb"(?<!\\)(?:\\\\)*\\u0000")
_EXPECTED = re.compile(r"(?P<what>.*?)(?:, got (?P<got>.*?))?(?: - at `(?P<at>.*)`)?", re.DOTALL)


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """The content of one kind of file, or of a part of it.

    A class checks what its types do not say in `__post_init__`, which raises a ValueError.
    """

    LARGEST: ClassVar[int] = 16 << 20  # bytes of such a file
    WHOLE: ClassVar[bool] = False  # it has all keys that such a file has

    @classmethod
    def upgraded(cls, content: dict[str, Any]) -> dict[str, Any]:
        """Return the content of an older version as one of this version.

        It is called if the content does not fit the types, and may have any types inside.
        """
        return content


def read(kind: type[T], path: Path, parts: int = 1, largest: int = 0) -> T:
    """Return the content of a file, which may be a stranger's: see `read_owned`."""
    return read_owned(kind, path, parts, largest)[0]


def read_owned(kind: type[T], path: Path, parts: int = 1, largest: int = 0) -> tuple[T, int]:
    """Return the content of a file, which may be a stranger's, and the user id of its owner.

    Args:
        kind: A class of records, or a type of records such as `dict[str, Sale]`.
        path: The file.
        parts: How many of the last parts of `path` lie below the run directory or data set. None
            of them may be a link.
        largest: The most bytes it may have; by default those of the class.

    Raises:
        FileNotFoundError: There is no such file.
        DamageError: It cannot be read, or it is not such a file.
    """
    largest = largest or getattr(kind, "LARGEST", Record.LARGEST)
    content, owner = read_bytes(path, parts, largest)
    found = decode(kind, content, path)
    if getattr(kind, "WHOLE", False):
        _say_unknown(kind, content, path)
    return found, owner


def _say_unknown(kind: Any, content: bytes, file: object) -> None:
    """Log which keys of a file that was decoded are left out, once for the same keys."""
    with suppress(msgspec.MsgspecError, ValueError, RecursionError):
        if unknown := _keys.decode(content).keys() - set(kind.__struct_fields__):
            said = (kind, frozenset(unknown))
            if said not in _said:
                _said.add(said)
                names = ", ".join(sorted(unknown)[:12])
                log.warning("%s: a newer hpctrain wrote it; left out: %s", file, names[:200])


_keys = msgspec.json.Decoder(dict[str, msgspec.Raw])
_said: set[tuple[Any, frozenset[str]]] = set()


def read_bytes(path: Path, parts: int, largest: int) -> tuple[bytes, int]:
    """Return the bytes of a file and its owner; `read_owned` has the arguments and errors."""
    try:
        with open_regular(path, parts) as file:
            content, owner = file.read(largest + 1), os.fstat(file.fileno()).st_uid
    except NotADirectoryError as error:
        raise FileNotFoundError(*error.args) from None
    except FileNotFoundError:
        raise
    except OSError as error:
        raise DamageError(path, f"it cannot be read ({error.strerror})") from error
    if len(content) > largest:
        raise DamageError(path, f"it has more than {largest:,} bytes, the most of its kind")
    return content, owner


def read_known(kind: type[T], path: Path, parts: int = 1) -> T | None:
    """Return the content of a file that helps but is not needed.

    None if there is none; if it is damaged, the log says so.
    """
    try:
        return read(kind, path, parts)
    except FileNotFoundError:
        return None
    except DamageError as error:
        log.warning("%s: it is left out", error)
        return None


def decode(kind: type[T], content: bytes, file: object, *, surrogates: bool = False) -> T:
    """Return the value of a JSON text.

    Args:
        kind: A class of records, or a type of records.
        content: The text, UTF-8.
        file: Where it stands, for the error: a path, or `PATH line 3`.
        surrogates: Whether half a surrogate pair stays in a text, as in names of files; otherwise
            it becomes a question mark.

    Raises:
        DamageError: It is not such a value, or has a text with NUL.
    """
    if b"\\u0000" in content and _NUL.search(content):
        raise DamageError(file, "it has the character NUL in a text")
    asked: Any = kind
    try:
        value: T = _decoder(asked).decode(content)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        return _decode_again(kind, content, file, error, surrogates)
    return value


@functools.cache
def _decoder(kind: Any) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(kind)


def _decode_again(
    kind: type[T], content: bytes, file: object, error: Exception, surrogates: bool
) -> T:
    """Decode what the fast way refused: NaN, an older version, or damage."""
    try:
        tree = json.loads(content)
        text = json.dumps(tree, ensure_ascii=False)
        if not (surrogates or text.isascii()):
            tree = json.loads(text.encode(errors="replace"))
    except UnicodeError:
        raise DamageError(file, "it has text that is not Unicode") from None
    except RecursionError:
        raise DamageError(file, "it is nested too deeply") from None
    except ValueError:
        raise DamageError(
            file, f"it is not valid JSON ({str(error).partition(': ')[2] or error})"
        ) from None
    return convert(kind, tree, file)


def convert(kind: type[T], tree: Any, file: object) -> T:
    """Return the record of a value that another parser has read, such as YAML's.

    Raises:
        DamageError: It is not such a value.
    """
    if isinstance(tree, dict) and isinstance(kind, type) and issubclass(kind, Record):
        # If it is damaged, too, the types below tell where.
        with suppress(TypeError, ValueError, LookupError, AttributeError):
            tree = kind.upgraded(tree)
    try:
        return msgspec.convert(tree, kind, str_keys=True)
    except msgspec.ValidationError as error:
        match = _EXPECTED.fullmatch(str(error))
        assert match is not None
        at = (match["at"] or "$").replace("key` in `", "a key of ")
        found = _standing(tree, at) or match["got"] or ""
        allowed = re.sub("^Expected", "it must be", match["what"])
        allowed = re.sub("^Object missing required field (.*)", r"the key \1 is missing", allowed)
        _, _, pattern = allowed.partition(" matching regex ")
        if pattern in _WORDS:
            allowed = f"it must be {_WORDS[pattern]}"
        raise DamageError(file, allowed, at, found) from None
    except RecursionError:
        raise DamageError(file, "it is nested too deeply") from None


def _standing(tree: Any, at: str) -> str:
    """Return the value at a place such as `$.attempts[0].started`; "" if the place is not exact."""
    for name, index in re.findall(r"\.([^.\[]+)|\[([^\]]*)\]", at):
        try:
            tree = tree[name] if name else tree[int(index)]
        except (TypeError, ValueError, LookupError):
            return ""
    if isinstance(tree, dict | list):
        return ""
    text = json.dumps(tree, default=str)
    return text if len(text) <= 60 else f"{text[:57]}..."
