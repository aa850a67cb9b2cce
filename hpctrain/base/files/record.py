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

Versions. A kind of file with the key `version` has its number in `VERSION`. What a newer hpctrain
has written is read as far as it is known: unknown keys are skipped, and what cannot be read is told
to be newer, not damaged. A file without the number is older than the numbers; it lacks keys, which
have defaults. A key never changes its meaning: a new one takes its place, since a job that waits
runs an older copy of this code. So there is no number where it would tell nothing more: in a line
of a journal or history, in a list (sweep.json), in a file by host (excluded.json), which older
copies of the code also write, and in notes between processes of one job. Files of before have NaN
and Infinity, which are no JSON: they are read where any `float` may stand, and are errors where
`Finite` or a type made of it stands.
"""

import functools
import json
import logging
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, BinaryIO, ClassVar, Literal, TypeVar

import msgspec
from msgspec import Meta

from hpctrain.base.errors import DamageError
from hpctrain.base.files.disk import open_regular

T = TypeVar("T")
log = logging.getLogger(__name__)

_WORDS: dict[str, str] = {}


def matching(pattern: str, words: str) -> Meta:
    """Return the constraint of a text that a regular expression matches; errors have the words."""
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
    VERSION: ClassVar[int] = 0  # of a kind of file whose keys are all here; 0: it has no number


def read(kind: type[T], path: Path, parts: int = 1) -> T:
    """Return the content of a file, which may be a stranger's: see `read_owned`."""
    return read_owned(kind, path, parts)[0]


def read_owned(kind: type[T], path: Path, parts: int = 1) -> tuple[T, int]:
    """Return the content of a file, which may be a stranger's, and the user id of its owner.

    `parts` are those of `disk.open_below`. A file that is there, but cannot be read or is not such
    a file, is a DamageError.
    """
    content, owner = read_bytes(path, parts, getattr(kind, "LARGEST", Record.LARGEST))
    return decode(kind, content, path), owner


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


def lines(file: BinaryIO, path: Path) -> Iterator[tuple[bytes, int]]:
    """Yield each line of an open file from where it stands, and how many bytes it has.

    A line that is longer than LONGEST_LINE is no record, but a hole that a crash has left, or a
    stranger's: the log says where it is, and only its newline is given, if it has one.
    """
    while line := file.readline(LONGEST_LINE):
        size = len(line)
        if size == LONGEST_LINE and not line.endswith(b"\n"):
            begin = file.tell() - size
            line = _rest_of_line(file)[-1:]
            line, size = line if line == b"\n" else b"", file.tell() - begin
            say(
                f"{path}: the line that begins at byte {begin:,} has {size:,} bytes, and a record "
                f"has at most {LONGEST_LINE:,}: it is left out"
            )
        yield line, size


LONGEST_LINE = 16 << 20


def _rest_of_line(file: BinaryIO) -> bytes:
    """Read to the end of a line, over the holes in it; return the last part of it."""
    while True:
        file.seek(next_data(file.fileno(), file.tell()))
        part = file.readline(1 << 20)
        if not part or part.endswith(b"\n"):
            return part


def next_data(descriptor: int, position: int) -> int:
    """Return where the next byte of a file is from a position on that is in no hole, or its end."""
    here = os.lseek(descriptor, 0, os.SEEK_CUR)
    try:
        return os.lseek(descriptor, position, os.SEEK_DATA)
    except OSError:  # there is none
        return os.lseek(descriptor, 0, os.SEEK_END)
    finally:
        os.lseek(descriptor, here, os.SEEK_SET)


@functools.cache
def say(problem: str) -> None:
    """Log what is left out, once."""
    log.warning("%s", problem)


def decode(kind: type[T], content: bytes, file: object, *, surrogates: bool = False) -> T:
    """Return the value of a JSON text, which stands in `file`, such as `PATH line 3`.

    With `surrogates`, half a surrogate pair stays in a text, as in names of files; otherwise it
    becomes a question mark. Another value, or a text with NUL, is a DamageError.
    """
    if b"\\u0000" in content and _NUL.search(content):
        raise DamageError(file, "it has the character NUL in a text")
    asked: Any = kind
    try:
        return _decoder(asked).decode(content)  # type: ignore[no-any-return]
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        return _decode_again(kind, content, file, error, surrogates)


def written(value: Any) -> str:
    """Return the text of a file: of a record, with its version, or of others in a dict or list."""
    content, version = msgspec.to_builtins(value), getattr(value, "VERSION", 0)
    content = {"version": version, **content} if version else content
    return json.dumps(content, indent=1) + "\n"


def _newer(kind: Any, tree: Any) -> int:
    """Return the version of a file if it is newer than that of its kind, or 0."""
    version = tree.get("version") if isinstance(tree, dict) else 0
    return version if type(version) is int and version > getattr(kind, "VERSION", 0) > 0 else 0


@functools.cache
def _decoder(kind: Any) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(kind)


def _decode_again(
    kind: type[T], content: bytes, file: object, error: Exception, surrogates: bool
) -> T:
    """Decode what the fast way refused: NaN, half a surrogate pair, a newer version, or damage."""
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
    try:
        return convert(kind, tree, file)
    except DamageError as damage:
        if not (newer := _newer(kind, tree)):
            raise
        why = f"is of a newer hpctrain (version {newer}; this one knows {kind.VERSION})"  # type: ignore[attr-defined]
        raise DamageError(file, damage.allowed, damage.at, damage.found, why) from None


def convert(kind: type[T], tree: Any, file: object) -> T:
    """Return the record of a value that another parser has read, such as YAML's."""
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
