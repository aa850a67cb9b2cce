"""Tar files of samples, as webdataset writes them.

A sample is the consecutive members whose names are the same up to the first dot of the file name.
That part is the key of the sample; the rest, the extension, says what a member holds:

    0017.jpg  0017.cls           image and label, by default
    0017.json                    nothing by default: --field caption=json:text

Without --field, the members of the first sample decide the fields: an image is the field `image`,
cls is `label` (int64), txt is `text` (UTF-8), NAME.npy is an array NAME, and npy alone is `array`.
With --field, only the named members are taken. Tars, also compressed ones (gz, bz2, xz), are read
as streams; nothing is extracted. For a split such as `train=0.9,val=0.1`, the key decides.
"""

import argparse
import io
import re
import tarfile
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from lzma import LZMAError
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np

from data_prep.formats.files import in_folders
from data_prep.formats.images import pixels
from data_prep.formats.images.image_files import SUFFIXES
from data_prep.formats.images.pixels import Pixels
from data_prep.formats.samples import Unusable, key_of
from data_prep.options import VARIABLE, Options, writing
from data_prep.source import BadRecords, InputSource, Piece, SourceFile
from data_prep.sources.stream import Encoded, Stream
from hpctrain.base.errors import ConfigError

IMAGES = sorted(suffix[1:] for suffix in SUFFIXES)
KINDS = dict.fromkeys(IMAGES, "image")  # the kind of members by the end of their extension
KINDS |= dict.fromkeys(("cls", "index"), "number")
KINDS |= dict.fromkeys(("txt", "text", "transcript"), "text") | {"npy": "array"}

ARGUMENTS = f"""
tars=TAR+ : path
    a tar, or a folder
--field NAME=EXT,… ...
    the field NAME is the member with one of these extensions; json:KEY takes a key of a JSON
    object, EXT:bytes takes the bytes of any member
{VARIABLE}
{pixels.OPTIONS}
{writing()}
"""
EPILOG = pixels.__doc__


class _Member(NamedTuple):
    """The members of samples that become a field."""

    extensions: tuple[str, ...]
    kind: str  # image, number, text, array, json, bytes
    key: str = ""  # key in the JSON object


@dataclass(frozen=True)
class _WebDataset(Stream):
    keyed = True
    members: Mapping[str, _Member] = field(default_factory=dict)

    def encoded(self, what: str, reading: BadRecords) -> Iterator[Encoded]:
        """See `Stream`."""
        extensions = frozenset(e for m in self.members.values() for e in m.extensions)
        for key, parts in samples(what, extensions, reading):
            name = key.encode("utf-8", "surrogateescape")
            yield Encoded(what, f"sample {key!r}", partial(self._values, parts), name)

    def _values(self, parts: Mapping[str, bytes]) -> tuple[dict[str, Any], str]:
        """Decode the members of a sample."""
        values = {}
        for name, member in self.members.items():
            found = [extension for extension in member.extensions if extension in parts]
            if len(found) != 1:
                some = "two members" if found else "no member"
                listed = ", .".join(found or member.extensions)
                raise Unusable(f"it has {some} .{listed} for {name!r}")
            content = parts[found[0]]
            try:
                values[name] = (
                    self.pixels.sample(content, self.fields.get(name))
                    if member.kind == "image"
                    else _decoded(content, member)
                )
            except Unusable as error:
                raise Unusable(f".{found[0]}: {error}") from None
        return values, ""


def source(args: argparse.Namespace, options: Options) -> InputSource:
    """Return the samples of tar files; each tar is a piece."""
    pixels, tars = Pixels.of(args), _tars(args.tars)
    files = [SourceFile.of(tar) for tar in tars]
    members, problems = _members(args.field), BadRecords(options.on_error)
    first = ((tar, parts) for tar in tars for _, parts in samples(str(tar), None, problems))
    for tar, parts in () if members else first:
        members = _by_default(str(tar), parts)
        break
    found = _WebDataset(
        name="webdataset",
        fields={},
        pieces=[Piece(file.path, (file,), bytes=file.size) for file in files],
        identity={"members": members, "pixels": asdict(pixels)},
        about={"from": [str(tar.absolute()) for tar in tars]},
        pixels=pixels,
        images=frozenset(name for name, member in members.items() if member.kind == "image"),
        members=members,
    )
    none = f"{tars[0]}{' …' * (len(tars) > 1)}: there is no sample to use"
    return found.with_fields(options, args.variable, none)


def _tars(paths: Sequence[Path]) -> list[Path]:
    tars = [*in_folders(paths, lambda p: ".tar" in p.suffixes or p.suffix == ".tgz", ".tar")]
    for path, count in Counter(tars).items():
        if count > 1:
            raise ConfigError(f"{path} is given twice")
    return tars


def _members(named: Sequence[str]) -> dict[str, _Member]:
    """Parse the values NAME=EXT,… of --field."""
    members: dict[str, _Member] = {}
    for text in named:
        name, _, extensions = text.partition("=")
        if name in members:
            raise ConfigError(f"--field {name} is there twice")
        if extensions.startswith("json:") and extensions != "json:bytes":
            members[name] = _Member(("json",), "json", extensions[5:])
            continue
        parts = [part.partition(":") for part in extensions.lower().split(",")]
        kinds = {"bytes" if how == "bytes" else "" if how else _kind(ext) for ext, _, how in parts}
        if not name or not all(ext for ext, _, _ in parts) or len(kinds) > 1 or "" in kinds:
            raise ConfigError(
                f"--field {text!r}: it is NAME=EXT,… with extensions of one kind: "
                f"{', '.join(KINDS)}, json:KEY, or any as EXT:bytes"
            )
        members[name] = _Member(tuple(ext for ext, _, _ in parts), kinds.pop())
    return members


def _kind(extension: str) -> str:
    """Return the kind of the members with this extension, or "" if it is not known."""
    return KINDS.get(extension.rpartition(".")[2], "")


def _by_default(tar: str, parts: Mapping[str, bytes]) -> dict[str, _Member]:
    """Return the fields for samples with these extensions."""
    names = {"image": "image", "number": "label", "text": "text"}
    members: dict[str, _Member] = {}
    for extension in parts:
        kind = _kind(extension)
        name = names.get(kind, extension.removesuffix(".npy").replace("npy", "array"))
        problem = cure = ""
        if not kind:
            problem = (
                f"the first sample has members .{', .'.join(parts)}, and .{extension} has no field "
                "by default"
            )
            cure = "NAME=json:KEY" if extension == "json" else f"NAME={extension}:bytes"
        elif name in members:
            other = members[name].extensions[0]
            problem = f"the members .{other} and .{extension} would both be the field {name!r}"
            cure = f"{name}={extension}"
        if problem:
            raise ConfigError(f"{tar}: {problem}: give every field, such as --field {cure}")
        # Other samples may have another image format.
        others = [image for image in IMAGES if image != extension] if kind == "image" else []
        members[name] = _Member((extension, *others), kind)
    return members


def _decoded(content: bytes, member: _Member) -> Any:
    if member.kind == "array":
        try:
            return np.load(io.BytesIO(content), allow_pickle=False)
        except Exception as error:  # NumPy evaluates the header as Python, which may raise anything
            raise Unusable(f"no readable .npy: {error}") from None
    if member.kind == "bytes":
        return content
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        raise Unusable(f"it is not UTF-8: {error.reason} at byte {error.start}") from None
    if member.kind == "number":
        if not re.fullmatch(r"\s*[+-]?\d{1,19}\s*", text, re.ASCII):
            raise Unusable(f"{text[:40]!r} is no whole number")
        return int(text)
    return key_of(text, member.key) if member.kind == "json" else content


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
    """Yield key and content by extension of each sample: consecutive members with one key."""
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
    return "the sample has this extension twice" if twice else ""
