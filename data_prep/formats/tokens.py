"""Text into tokens: the bytes themselves, or a tokenizer of Hugging Face's library `tokenizers`.

A tokenizer is its text, so that it goes to other processes and beside the shards as it was when
the work was planned.
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from hpctrain.data.ragged import Ragged, offsets_of
from hpctrain.data.types import Array
from hpctrain.errors import ConfigError, DataError

FILE = "tokenizer.json"  # in OUT
BYTES = 256
EOD = "<|endoftext|>"
# What the well-known tokenizers call the end of a document.
EODS = (EOD, "</s>", "<eos>", "<|end_of_text|>", "<｜end▁of▁sentence｜>")  # noqa: RUF001
SMALLEST = BYTES + 1  # vocabulary of a trained one: every byte, and the end of a document


@dataclass(frozen=True)
class Tokenizer:
    """How documents become tokens.

    Attributes:
        name: For people.
        vocabulary: Ids are 0 … vocabulary - 1.
        eod: The id that ends each document; None: none does.
        content: tokenizer.json; "": the tokens are the bytes.
    """

    name: str
    vocabulary: int
    eod: int | None
    content: str = ""

    @property
    def dtype(self) -> str:
        """Of the tokens: the smallest of the two that loaders know what to do with."""
        return "uint16" if self.vocabulary <= 2**16 else "uint32"

    @property
    def digest(self) -> str:
        """Names the mapping from text to ids."""
        return digest_of(self.content or "bytes")

    @property
    def about(self) -> dict[str, Any]:
        """For the provenance; JSON."""
        about = {
            "name": self.name,
            "vocabulary": self.vocabulary,
            "eod": self.eod,
            "digest": self.digest,
        }
        return {**about, "tokenizers": _library().__version__} if self.content else about

    def encode(self, texts: Sequence[str], threads: int = 1) -> Ragged:
        """Return the tokens of at least one document each, of `dtype`."""
        if self.content:
            return self._encode(texts, threads)
        encoded = [text.encode() for text in texts]
        end = b"" if self.eod is None else b"\0"
        values = np.frombuffer(end.join([*encoded, b""]), np.uint8).astype(self.dtype)
        offsets = offsets_of([len(text) + len(end) for text in encoded])
        if self.eod is not None:
            values[offsets[1:] - 1] = self.eod
        return Ragged(values, offsets)

    def _encode(self, texts: Sequence[str], threads: int) -> Ragged:
        # Read by the library at each call. Its threads would compete with our processes.
        os.environ["TOKENIZERS_PARALLELISM"] = "true" if threads > 1 else "false"
        tokenizer = _loaded(self.content)
        encode = getattr(tokenizer, "encode_batch_fast", tokenizer.encode_batch)
        end = [] if self.eod is None else [self.eod]
        samples: list[Array] = [
            np.array(found.ids + end, self.dtype)
            for found in encode(list(texts), add_special_tokens=False)
        ]
        return Ragged.of(samples)


def digest_of(content: str) -> str:
    """Of a tokenizer.json's text; the same as the file's."""
    return "xxh3_128:" + xxhash.xxh3_128_hexdigest(content.encode())


def of_bytes(eod: bool) -> Tokenizer:
    """UTF-8: 256 ids, and one for the end of a document."""
    return Tokenizer("bytes", BYTES + eod, BYTES if eod else None)


def of_file(path: Path, eod: bool, token: str | None = None) -> Tokenizer:
    """A tokenizer.json.

    Args:
        path: Of the file.
        eod: Whether documents are ended.
        token: That ends them; None: the one that the tokenizer is known to have for it.

    Raises:
        ConfigError: It has no such token, or several that could be meant.
        DataError: The file cannot be read, or is no tokenizer.
    """
    try:
        content = path.read_bytes().decode()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise DataError(f"{path} is no {FILE}: it is not UTF-8") from None
    return of_content(content, str(path), eod, token)


def of_content(content: str, name: str, eod: bool, token: str | None = None) -> Tokenizer:
    """The same, of the file's text."""
    try:
        tokenizer = _loaded(content)
    except DataError:
        raise
    except Exception as error:  # the library raises bare Exceptions
        raise DataError(f"{name} is no {FILE} of Hugging Face tokenizers: {error}") from None
    end = _end(tokenizer, name, token) if eod else None
    # Not the number of entries: ids may have gaps.
    highest = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
    if highest < 0:
        raise DataError(f"{name} has no tokens")
    return Tokenizer(name, highest + 1, end, content)


def trained(texts: Iterator[str], vocabulary: int) -> str:
    """Train a byte-level BPE; the same text gives the same tokenizer.

    Args:
        texts: Documents.
        vocabulary: How many tokens, with 256 bytes and the end of a document.

    Returns:
        The content of tokenizer.json.
    """
    library = _library()
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    tokenizer = library.Tokenizer(library.models.BPE())
    tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[EOD],
        initial_alphabet=library.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    content: str = tokenizer.to_str(pretty=True)
    return content


def _end(tokenizer: Any, name: str, token: str | None) -> int:
    if token is None:
        known = [end for end in EODS if tokenizer.token_to_id(end) is not None]
        if len(known) != 1:
            has = f"has {' and '.join(known)}" if known else f"has none of {', '.join(EODS)}"
            raise ConfigError(
                f"{name}: which token ends a document? It {has}; give --eod TOKEN, or --no-eod"
            )
        token = known[0]
    found: int | None = tokenizer.token_to_id(token)
    if found is None:
        raise ConfigError(f"--eod {token!r}: {name} has no such token")
    return found


@lru_cache(maxsize=2)
def _loaded(content: str) -> Any:
    tokenizer = _library().Tokenizer.from_str(content)
    # What a model's own file may ask for would shorten documents or fill them up, and take a
    # text that spells a special token for that token.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True
    return tokenizer


def _library() -> Any:
    try:
        import tokenizers
        from tokenizers import decoders, models, pre_tokenizers, trainers  # noqa: F401
    except ImportError:
        raise DataError(
            "this needs the library tokenizers, which is not installed: "
            "pip install 'hpctrain[prep]'"
        ) from None
    return tokenizers
