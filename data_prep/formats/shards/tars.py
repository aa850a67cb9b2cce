"""Samples in tar files, read as a stream. Nothing is extracted, so member names are harmless."""

import re
import tarfile
import zlib
from collections.abc import Iterator
from lzma import LZMAError
from typing import Self

from data_prep.source import BadRecords

MAX_MEMBER = 2**31  # bytes; the header of a sparse member may state any size
KEY = re.compile(r"((?:.*/)?[^./]+)\.([^/]+)", re.DOTALL)  # webdataset's rule


class _Header(tarfile.TarInfo):
    """A header whose damage is an error: tarfile takes a damaged header for the end of the tar."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
        try:
            return super().frombuf(buf, encoding, errors)
        except tarfile.EOFHeaderError:  # type: ignore[attr-defined]
            raise
        except tarfile.HeaderError as error:
            raise tarfile.ReadError(f"cut off or damaged ({error})") from None


def samples(
    path: str, extensions: frozenset[str] | None, reading: BadRecords
) -> Iterator[tuple[str, dict[str, bytes]]]:
    """Yield the samples of a tar: consecutive members with the same key.

    Yields:
        The key, and the content of the members by extension.
    """
    seen: set[str] = set()
    key, parts, good = "", dict[str, bytes](), False
    try:
        with tarfile.open(path, "r|*", tarinfo=_Header) as tar:
            for member in tar:
                tar.members = []  # type: ignore[attr-defined]  # the list would grow with every member
                name = KEY.fullmatch(member.name)
                if member.isdir() or (member.isreg() and name is None):
                    continue  # webdataset skips them, too
                if name is not None and name[1] != key:
                    if good:
                        yield key, parts
                    key, parts, good = name[1], {}, True
                    if key in seen:
                        good = False
                        reason = "it was there before: a sample's members are to be side by side"
                        reading.bad(path, f"sample {key!r}", reason)
                    seen.add(key)
                extension = name[2].lower() if name else ""
                if reason := _refused(member, extension in parts):
                    good = good and name is None  # a member without a key belongs to no sample
                    reading.bad(path, f"member {member.name!r}", reason)
                elif good and (extensions is None or extension in extensions):
                    file = tar.extractfile(member)
                    parts[extension] = file.read() if file else b""
            if good:
                yield key, parts
    except (tarfile.TarError, EOFError, OSError, zlib.error, LZMAError) as error:
        where = f"after the beginning of sample {key!r}" if key else ""
        why = error.strerror if isinstance(error, OSError) and error.strerror else error
        reading.bad(path, where, f"the tar cannot be read: {why}")


def _refused(member: tarfile.TarInfo, twice: bool) -> str:
    """Return why a member cannot be used, or ""."""
    if not member.isreg():
        link = member.issym() or member.islnk()
        return f"it is a link to {member.linkname!r}, no file" if link else "it is no file"
    if member.size > MAX_MEMBER:
        return f"its header says {member.size} bytes; at most {MAX_MEMBER} are read"
    return "the sample has this extension twice" if twice else ""
