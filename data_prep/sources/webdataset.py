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
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from data_prep.formats.images import pixels
from data_prep.formats.images.image_files import SUFFIXES
from data_prep.formats.images.pixels import Pixels
from data_prep.formats.samples import Encoded, Samples, Unusable, fields_of
from data_prep.formats.shards.tars import samples
from data_prep.options import VARIABLE, Options, add_arguments, add_repeated
from data_prep.source import BadRecords, Block, Piece, Source, SourceFile
from data_prep.writing.piece import Problems
from hpctrain.errors import ConfigError, DataError
from hpctrain.shards.field import Field

IMAGES = frozenset(suffix[1:] for suffix in SUFFIXES)
# Members that hold pickles or other code, which webdataset and torch run when they decode them.
CODE = frozenset(("pyd", "pkl", "pickle", "pth", "pt", "ckpt", "joblib", "dill", "cloudpickle"))
NUMBERS, TEXTS = ("cls", "index"), ("txt", "text", "transcript")
KINDS = ", ".join([*sorted(IMAGES), *NUMBERS, *TEXTS, "npy", "json:KEY", "or any as EXT:bytes"])


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    parser.epilog = pixels.__doc__
    parser.add_argument("tars", nargs="+", type=Path, metavar="TAR", help="a tar, or a folder")
    what = (
        "the field NAME is the member with one of these extensions; json:KEY takes a key of a JSON "
        "object, EXT:bytes takes the bytes of any member"
    )
    add_repeated(parser, "--field", "NAME=EXT,…", what)
    add_repeated(parser, *VARIABLE)
    pixels.add_arguments(parser)
    add_arguments(parser)


def run(args: argparse.Namespace) -> None:
    """Convert the source that the command line names."""
    from data_prep.writing.convert import convert

    options = Options.of(args)
    source = webdataset(
        args.tars, options, Pixels.of(args), named=args.field, variable=args.variable
    )
    convert(source, args.out, options)


class Member(NamedTuple):
    """The members of samples that become a field."""

    extensions: tuple[str, ...]
    kind: str  # image, number, text, array, json, bytes
    key: str = ""  # key in the JSON object


@dataclass(frozen=True)
class WebDataset(Source):
    """See `webdataset`."""

    members: Mapping[str, Member] = field(default_factory=dict)
    pixels: Pixels = field(default_factory=Pixels)

    def read(self, what: str, reading: BadRecords) -> Iterator[Block]:
        """See `Source`."""
        block = Samples(self.fields, what)
        rest = (self.members, self.pixels, self.fields)
        found = (
            Encoded(
                f"sample {key!r}",
                partial(_values, parts, *rest),
                key.encode("utf-8", "surrogateescape"),
            )
            for key, parts in samples(what, _extensions(self.members), reading)
        )
        return block.blocks(found, reading)


def webdataset(
    paths: Sequence[Path],
    options: Options,
    pixels: Pixels | None = None,
    *,
    named: Sequence[str] = (),
    variable: Sequence[str] = (),
) -> Source:
    """Make a source of tar files; each tar is a piece.

    Args:
        paths: Tars, or folders of tars.
        options: The options of the conversion; `on_error` is used.
        pixels: How images become samples.
        named: "NAME=EXT,…"; if empty, the first sample's extensions decide the fields.
        variable: Fields whose first axis varies in length.

    Raises:
        ConfigError: A field is not possible, or is given twice.
        DataError: There is no tar, a tar cannot be read, or no sample can be used.
    """
    pixels = pixels or Pixels()
    tars = _tars(paths)
    files = [SourceFile.of(tar) for tar in tars]
    members = _members(named)
    fields: dict[str, Field] = {}
    problems = Problems(options.on_error)
    for tar in tars:
        for key, parts in samples(str(tar), _extensions(members), problems):
            try:
                chosen = members or _by_default(str(tar), parts)
                values = _values(parts, chosen, pixels, {})
                fields = _fields(values, chosen, pixels, variable)
            except Unusable as error:
                problems.bad(str(tar), f"sample {key!r}", str(error))
                continue
            members = chosen
            break
        if fields:
            break
    if not fields:
        why = f": {problems.found[0]}" if problems.found else ""
        raise DataError(f"{tars[0]}{' …' * (len(tars) > 1)}: there is no sample to use{why}")
    return WebDataset(
        name="webdataset",
        fields=fields,
        pieces=[Piece(file.path, (file,), bytes=file.size) for file in files],
        identity={"members": members, "pixels": asdict(pixels)},
        about={"from": [str(tar.absolute()) for tar in tars]},
        members=members,
        pixels=pixels,
    )


def _tars(paths: Sequence[Path]) -> list[Path]:
    tars: list[Path] = []
    for path in paths:
        if path.is_dir():
            found = sorted(p for p in path.iterdir() if ".tar" in p.suffixes or p.suffix == ".tgz")
            if not found:
                raise DataError(f"{path} has no .tar files")
            tars += found
        else:
            tars.append(path)
    for path in tars:
        if tars.count(path) > 1:
            raise ConfigError(f"{path} is given twice")
    return tars


def _members(named: Sequence[str]) -> dict[str, Member]:
    """Parse the values NAME=EXT,… of --field."""
    members: dict[str, Member] = {}
    for text in named:
        name, _, extensions = text.partition("=")
        if name in members:
            raise ConfigError(f"--field {name} is there twice")
        if extensions.startswith("json:") and extensions != "json:bytes":
            members[name] = Member(("json",), "json", extensions[5:])
            continue
        parts = [part.partition(":") for part in extensions.lower().split(",")]
        _check_no_code(f"--field {text}", (ext for ext, _, how in parts if how != "bytes"))
        kinds = {"bytes" if how == "bytes" else "" if how else _kind(ext) for ext, _, how in parts}
        if not name or not all(ext for ext, _, _ in parts) or len(kinds) > 1 or "" in kinds:
            raise ConfigError(
                f"--field {text!r}: it is NAME=EXT,… with extensions of one kind: {KINDS}"
            )
        members[name] = Member(tuple(ext for ext, _, _ in parts), kinds.pop())
    return members


def _kind(extension: str) -> str:
    """Return the kind of the members with this extension, or "" if it is not known."""
    last = extension.rpartition(".")[2]
    for kind, known in (("image", IMAGES), ("number", NUMBERS), ("text", TEXTS)):
        if last in known:
            return kind
    return "array" if last == "npy" else ""


def _check_no_code(where: str, extensions: Iterable[str]) -> None:
    """Check that no member runs code when it is decoded; `where` begins the message."""
    for extension in extensions:
        if extension.rpartition(".")[2] in CODE:
            raise ConfigError(
                f"{where}: members .{extension} hold pickles, which run code when they are "
                "decoded, and are never read; --field NAME=EXT takes the other members"
            )


def _by_default(tar: str, parts: Mapping[str, bytes]) -> dict[str, Member]:
    """Return the fields for samples with these extensions."""
    names = {"image": "image", "number": "label", "text": "text"}
    members: dict[str, Member] = {}
    _check_no_code(tar, parts)
    for extension in parts:
        kind = _kind(extension)
        if not kind:
            example = "NAME=json:KEY" if extension == "json" else f"NAME={extension}:bytes"
            raise ConfigError(
                f"{tar}: the first sample has members .{', .'.join(parts)}, and .{extension} has "
                f"no field by default: give every field, such as --field {example}"
            )
        name = extension.removesuffix(".npy").replace("npy", "array")
        name = names.get(kind, name)
        if name in members:
            raise ConfigError(
                f"{tar}: the members .{members[name].extensions[0]} and .{extension} would both be "
                f"the field {name!r}: give every field, such as --field {name}={extension}"
            )
        members[name] = Member((extension,), kind)
        if kind == "image":  # other samples may have another image format
            members[name] = Member((extension, *sorted(IMAGES - {extension})), kind)
    return members


def _extensions(members: Mapping[str, Member]) -> frozenset[str] | None:
    """Return the extensions to read; None means all."""
    return frozenset(e for m in members.values() for e in m.extensions) if members else None


def _values(
    parts: Mapping[str, bytes],
    members: Mapping[str, Member],
    pixels: Pixels,
    fields: Mapping[str, Field],
) -> dict[str, Any]:
    """Decode the members of a sample."""
    values = {}
    for name, member in members.items():
        found = [extension for extension in member.extensions if extension in parts]
        if len(found) != 1:
            some = "two members" if found else "no member"
            raise Unusable(f"it has {some} .{', .'.join(found or member.extensions)} for {name!r}")
        try:
            values[name] = _decoded(parts[found[0]], member, pixels, fields.get(name))
        except Unusable as error:
            raise Unusable(f".{found[0]}: {error}") from None
    return values


def _decoded(content: bytes, member: Member, pixels: Pixels, spec: Field | None) -> Any:
    if member.kind == "image":
        return pixels.sample(content, spec)
    if member.kind == "array":
        try:
            return np.load(io.BytesIO(content), allow_pickle=False)
        except Exception as error:  # NumPy evaluates the header as Python, which may raise anything
            raise Unusable(f"no readable .npy: {error}") from None
    if member.kind == "bytes":
        return content
    try:
        text = content.decode()
        if member.kind == "number":
            if not re.fullmatch(r"\s*[+-]?\d{1,19}\s*", text, re.ASCII):
                raise Unusable(f"{text[:40]!r} is no whole number")
            return int(text)
        if member.kind == "json":
            values = json.loads(text)
            if not isinstance(values, dict) or member.key not in values:
                raise Unusable(f"there is no key {member.key!r}")
            return values[member.key]
    except UnicodeDecodeError as error:
        raise Unusable(f"it is not UTF-8: {error.reason} at byte {error.start}") from None
    except (ValueError, RecursionError) as error:
        raise Unusable(f"it is not JSON: {error}") from None
    return content


def _fields(
    values: Mapping[str, Any],
    members: Mapping[str, Member],
    pixels: Pixels,
    variable: Sequence[str],
) -> dict[str, Field]:
    fields = fields_of(values, variable)
    images = [name for name in values if members[name].kind == "image"]
    return fields | {name: pixels.field_of(values[name]) for name in images}
