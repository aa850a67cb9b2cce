"""Documents as tokens: text files, JSON Lines and Parquet become one variable-length field.

SRC are files or folders. A text file is one document, or each of its lines is (--documents lines).
In JSON Lines (.jsonl) and Parquet, each object or row is a document, with the text in
--text-column. Files may be compressed (.gz, .zst). In a folder, .txt, .jsonl and .parquet files are
taken, or those that match --glob:

    python -m data_prep text corpus/ OUT --tokenizer tokenizer.json --split train=0.99,val=0.01
    python -m data_prep text src/ OUT --glob '*.py' --glob '*.md' --train-bpe 8192

Each sample of the field `tokens` (uint16, or uint32 if the vocabulary is larger than 65,536) is a
document. Each document ends with the end-of-document token. A shard holds the tokens of all its
documents without gaps, and their offsets; the loader cuts windows of any length from them. The
provenance in the index has the vocabulary, the id of that token, and the tokenizer's digest. A copy
of tokenizer.json is beside the shards.

--tokenizer bytes (the default) uses the bytes of UTF-8 as tokens, and 256 for the end of a
document. A tokenizer.json never turns text into special tokens, and never truncates or pads. The
split of a document depends only on its text, so it is the same for every tokenizer. A byte order
mark at the start of a file is dropped. Empty documents are left out and counted.
"""

import argparse
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby
from pathlib import Path

from data_prep.formats import files
from data_prep.formats.files import FileRange
from data_prep.formats.text import documents, tokens
from data_prep.formats.text.documents import Document
from data_prep.formats.text.tokens import Tokenizer
from data_prep.options import Options, writing
from data_prep.source import BadRecords, InputSource, Piece, SampleBlock, SourceFile
from data_prep.writing.split import ByFile
from hpctrain.base.errors import ConfigError
from hpctrain.data.shards.field import Field
from hpctrain.data.tokenizer import FILE

_BLOCK_TEXT = 2**20  # characters tokenized at once; a tokenizer needs about 100 bytes for each
_BLOCK_DOCUMENTS = 4096
_TRAIN_BYTES = 100_000_000  # of text that a tokenizer is trained on, from all parts of the source
_BYTES_PER_TOKEN = 4  # an estimate for a trained tokenizer; only used for the size of the shards

ARGUMENTS = f"""
sources=SRC+ : path
    files or folders
[text]
--glob PATTERN ...
    file names to take from folders (default: {" ".join(documents.PATTERNS)})
--documents {{files,lines}} = files
    whether a text file or each of its lines is a document
--text-column NAME = text
    the column with the text, in JSON Lines and Parquet
{files.OUTSIDE}
[one of]
--tokenizer bytes|FILE.json = bytes
    the bytes of UTF-8, or a tokenizer.json of Hugging Face
--train-bpe VOCABULARY : int
    train a byte-level BPE with this number of tokens on the source, on 100 MB of it at most
[text]
--eod TOKEN
    the tokenizer's token that ends a document
{writing()}
"""


@dataclass(frozen=True)
class _Text(InputSource):
    reader: documents.DocumentReader = field(default_factory=documents.DocumentReader)
    tokenizer: Tokenizer = field(default_factory=tokens.of_bytes)
    by_file: bool = False

    def read(self, what: Sequence[FileRange], reading: BadRecords) -> Iterator[SampleBlock]:
        """See `InputSource`."""
        for _, parts in groupby(what, lambda part: part.path if self.by_file else ""):
            found, size = list[Document](), 0
            for part in parts:
                for document in self.reader.read(part, reading):
                    found.append(document)
                    size += len(document.text)
                    if size >= _BLOCK_TEXT or len(found) == _BLOCK_DOCUMENTS:
                        yield self._block(found, part.path)
                        found, size = [], 0
            if found:
                yield self._block(found, part.path)

    def _block(self, found: list[Document], file: str) -> SampleBlock:
        texts = [document.text for document in found]
        return SampleBlock(
            {"tokens": self.tokenizer.encode(texts)},
            keys=[text.encode() for text in texts],
            column=[document.column for document in found],
            file=file,
        )


def source(args: argparse.Namespace, options: Options) -> InputSource:
    """Return documents as tokens."""
    if args.eod and (args.train_bpe is not None or args.tokenizer == "bytes"):
        raise ConfigError(f"--eod {args.eod!r} is for --tokenizer FILE.json, which may have it")
    reader = documents.DocumentReader(args.documents == "lines", args.text_column, options.column)
    found = files.find(args.sources, args.glob or documents.PATTERNS, args.allow_outside)
    if args.train_bpe is not None:
        name = f"trained on {', '.join(map(str, args.sources))}"
        texts = _sample(found.files, reader, _TRAIN_BYTES)
        tokenizer = tokens.trained(texts, args.train_bpe, name, quiet=args.quiet)
    elif args.tokenizer == "bytes":
        tokenizer = tokens.of_bytes()
    else:
        tokenizer = tokens.of_file(Path(args.tokenizer), args.eod)
    width = 2 if tokenizer.dtype == "uint16" else 4
    growth = width / (_BYTES_PER_TOKEN if tokenizer.content else 1)
    # A little less than a shard; otherwise most pieces would write a small second shard.
    room = max(1, int(options.shard_bytes / growth * 0.9))
    parts = (
        (part, file, int(size * growth))
        for file in found.files
        for part, size in reader.parts(file, room)
    )
    pieces: list[Piece] = files.pieces(parts, int(room * growth))
    by_file = isinstance(options.split, ByFile)
    sources = [str(source.absolute()) for source in args.sources]
    return _Text(
        name="text",
        fields={"tokens": Field(tokenizer.dtype, variable=True)},
        pieces=pieces,
        identity={
            **asdict(reader),
            "tokenizer": tokenizer.digest,
            "eod": tokenizer.eod,
            "files": [file.path for file in found.files] if by_file else [],
        },
        about={
            "from": sources,
            "ignored": found.ignored,
            "documents": "lines" if reader.lines else "files",
            "text_column": reader.key,
            "tokenizer": tokenizer.about,
        },
        columns=[options.column] if options.column else [],
        folders=sources,
        beside={FILE: tokenizer.content} if tokenizer.content else {},
        reader=reader,
        tokenizer=tokenizer,
        by_file=by_file,
    )


def _sample(
    found: Sequence[SourceFile], reader: documents.DocumentReader, limit: int, step: int = 2**22
) -> Iterator[str]:
    """Yield documents from all parts of all files, in total about `limit` bytes at most."""
    parts = [part for file in found for part in reader.parts(file, step)]
    total = max(1, sum(size for _, size in parts))
    room = 0.0 if total > limit else math.inf
    for part, size in parts:  # what a part leaves, the next may take
        room += size * limit / total
        for document in reader.read(part, BadRecords("skip")) if room > 0 else ():
            yield document.text
            room -= len(document.text.encode())
            if room <= 0:
                break
