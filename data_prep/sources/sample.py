"""Data for examples, tests and first runs that needs no download.

digits   scikit-learn's 1,797 handwritten digits: image uint8[1, 8, 8] of 0 to 16, label int64;
         train 80 %, val 20 % (1415 and 382)
stdlib   the source of Python's standard library, each file is a document: text and path as
         variable-length uint8 (UTF-8); train 90 %, val 10 %. With --train-bpe, also tokens, as
         `python -m data_prep text` writes them; the tokenizer is trained on the train split alone

    sample digits data/digits
    sample stdlib data/stdlib --train-bpe 4096
"""

import argparse
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.formats import files
from data_prep.formats.files import FileRange
from data_prep.formats.opening import is_utf8
from data_prep.formats.text import tokens
from data_prep.formats.text.tokens import Tokenizer
from data_prep.libraries import library
from data_prep.options import Options, writing
from data_prep.source import BadRecords, InputSource, Piece, SampleBlock, SourceFile
from data_prep.writing.split import Fractions
from hpctrain.base.errors import ConfigError, DataError
from hpctrain.data.shards.field import Field
from hpctrain.data.shards.types import Array
from hpctrain.data.tokenizer import FILE

# Left out: tests and examples, whose content repeats, and installed packages.
SKIPPED = {
    *("test", "tests", "idlelib", "turtledemo", "site-packages", "dist-packages"),
    *("__pycache__", "lib2to3"),
}
_DOCUMENTS = 256  # documents in a block
SPLITS = {"digits": "train=0.8,val=0.2", "stdlib": "train=0.9,val=0.1"}
ARGUMENTS = f"""
name={{{",".join(SPLITS)}}}
{writing("")}
[stdlib]
--train-bpe VOCABULARY : int
    also write tokens, of a byte-level BPE with this number of tokens
"""


def prepare(args: argparse.Namespace) -> None:
    """Without --split each of the data sets has its own splits."""
    args.split = args.split or SPLITS[args.name]


def source(args: argparse.Namespace, options: Options) -> InputSource:
    """Return the data set that the command line names."""
    if args.train_bpe is not None and args.name != "stdlib":
        raise ConfigError(f"--train-bpe is of `sample stdlib`, not of `sample {args.name}`")
    return stdlib(options, vocabulary=args.train_bpe) if args.name == "stdlib" else digits(options)


@dataclass(frozen=True)
class _Digits(InputSource):
    def read(self, what: Any, reading: BadRecords) -> Iterator[SampleBlock]:
        """See `InputSource`."""
        image, label = _digits()
        # The image decides the split, so equal images are in the same split.
        yield SampleBlock(
            {"image": image, "label": label}, keys=[sample.tobytes() for sample in image]
        )


def digits(options: Options) -> InputSource:
    """Make a source of scikit-learn's digits."""
    image, label = _digits()
    return _Digits(
        name="digits",
        fields={"image": Field("uint8", (1, 8, 8)), "label": Field("int64")},
        pieces=[Piece(None, bytes=image.nbytes + label.nbytes)],
        about={"from": "sklearn.datasets.load_digits"},
        categories={"label": [str(digit) for digit in range(10)]},
    )


def _digits() -> tuple[Array, Array]:
    sklearn = library(
        "sklearn.datasets", "`sample digits`", name="scikit-learn", install="'hpctrain[sample]'"
    )
    images, labels = sklearn.load_digits(return_X_y=True)
    return images.astype(np.uint8).reshape(-1, 1, 8, 8), labels.astype(np.int64)


@dataclass(frozen=True)
class _Stdlib(InputSource):
    folder: str = ""
    tokenizer: Tokenizer | None = None

    def read(self, what: Sequence[FileRange], reading: BadRecords) -> Iterator[SampleBlock]:
        """See `InputSource`."""
        found = ((path, Path(self.folder, path).read_bytes()) for path, *_ in what)
        documents = ((path.encode(), text) for path, text in found if text and is_utf8(text))
        while some := list(islice(documents, _DOCUMENTS)):
            paths, texts = zip(*some, strict=True)
            values: dict[str, Any] = {"text": [*map(_bytes, texts)], "path": [*map(_bytes, paths)]}
            if self.tokenizer is not None:
                values["tokens"] = self.tokenizer.encode([text.decode() for text in texts])
            yield SampleBlock(values, keys=paths)


def stdlib(
    options: Options, folder: Path | None = None, vocabulary: int | None = None
) -> InputSource:
    """Make a source of the standard library's .py files; each non-empty file is a document."""
    folder = folder or Path(sysconfig.get_paths()["stdlib"])
    paths = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.py"))
    paths = [path for path in paths if not SKIPPED & set(path.split("/"))]
    if not paths:
        raise DataError(f"there are no .py files under {folder}: this Python has no source")
    found = [SourceFile.of(folder / path) for path in paths]
    parts = [(FileRange(path), file, file.size) for path, file in zip(paths, found, strict=True)]
    pieces = files.pieces(parts, options.shard_bytes)
    fields = {"text": Field("uint8", variable=True), "path": Field("uint8", variable=True)}
    made = _Stdlib(
        name="stdlib",
        fields=fields,
        pieces=pieces,
        identity={"paths": paths},
        about={"from": "the Python standard library"},
        folder=str(folder),
    )
    if vocabulary is None:
        return made
    tokenizer = _trained(folder, paths, vocabulary, options)
    return replace(
        made,
        fields={**fields, "tokens": Field(tokenizer.dtype, variable=True)},
        identity={**made.identity, "tokenizer": tokenizer.digest},
        about={**made.about, "tokenizer": tokenizer.about},
        beside={FILE: tokenizer.content},
        tokenizer=tokenizer,
    )


def _trained(folder: Path, paths: Sequence[str], vocabulary: int, options: Options) -> Tokenizer:
    """Train a BPE on the files of the first split, so that it has not seen the other splits."""
    if not isinstance(options.split, Fractions):
        raise ConfigError(
            f"--split {options.split}: --train-bpe of `sample stdlib` needs NAME=FRACTION,…"
        )
    names = options.split.of_keys(path.encode() for path in paths)
    first = options.split.names[0]
    texts = (
        text.decode()
        for path, name in zip(paths, names, strict=True)
        if name == first and is_utf8(text := (folder / path).read_bytes())
    )
    return tokens.trained(texts, vocabulary, f"trained on the {first} split", quiet=options.quiet)


def _bytes(text: bytes) -> Array:
    return np.frombuffer(text, np.uint8)
