"""Convert text to tokens: its bytes, or the tokens of Hugging Face's library `tokenizers`.

A `Tokenizer` holds the content of its tokenizer.json. So worker processes and the copy beside the
shards get the tokenizer as it was when the conversion was planned.
"""

import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from data_prep.libraries import library
from data_prep.source import content_of
from hpctrain.base.errors import ConfigError, DataError
from hpctrain.data.shards.ragged import Ragged, offsets_of
from hpctrain.data.shards.types import Array
from hpctrain.data.tokenizer import BYTES, FILE, loaded

_EOD = "<|endoftext|>"
# The end-of-document tokens of well-known tokenizers.
_EODS = (_EOD, "</s>", "<eos>", "<|end_of_text|>", "<｜end▁of▁sentence｜>")  # noqa: RUF001
_SMALLEST = BYTES + 1  # the least vocabulary: all bytes, and the end-of-document token


@dataclass(frozen=True)
class Tokenizer:
    """How documents become tokens."""

    name: str  # a name for messages and the provenance
    vocabulary: int  # the ids are 0 to vocabulary - 1
    eod: int  # the id that ends each document
    content: str = ""  # the text of tokenizer.json; "" if the tokens are the bytes

    @property
    def dtype(self) -> str:
        """The dtype of the tokens: uint16 if it is enough, otherwise uint32."""
        return "uint16" if self.vocabulary <= 2**16 else "uint32"

    @property
    def digest(self) -> str:
        """A digest that identifies the mapping from text to ids."""
        return digest_of(self.content or "bytes")

    @property
    def about(self) -> dict[str, Any]:
        """The tokenizer's entry in the provenance, as JSON."""
        about = {
            "name": self.name,
            "vocabulary": self.vocabulary,
            "eod": self.eod,
            "digest": self.digest,
        }
        return {**about, "tokenizers": library("tokenizers").__version__} if self.content else about

    def encode(self, texts: Sequence[str]) -> Ragged:
        """Return the tokens of each document, as `dtype`; there is at least one document."""
        if self.content:
            return self._encode(texts)
        encoded = [text.encode() for text in texts]
        values = np.frombuffer(b"\0".join([*encoded, b""]), np.uint8).astype(self.dtype)
        offsets = offsets_of([len(text) + 1 for text in encoded])
        values[offsets[1:] - 1] = self.eod
        return Ragged(values, offsets)

    def _encode(self, texts: Sequence[str]) -> Ragged:
        # The library reads this at each call. Its threads would compete with our processes.
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        tokenizer = loaded(self.content)
        encode = getattr(tokenizer, "encode_batch_fast", tokenizer.encode_batch)
        samples: list[Array] = [
            np.array([*found.ids, self.eod], self.dtype)
            for found in encode(list(texts), add_special_tokens=False)
        ]
        return Ragged.of(samples)


def digest_of(content: str) -> str:
    """Return the digest of a tokenizer.json's text, which is that of the file."""
    return "xxh3_128:" + xxhash.xxh3_128_hexdigest(content.encode())


def of_bytes() -> Tokenizer:
    """Return the tokenizer of UTF-8 bytes: 256 ids, and one for the document's end."""
    return Tokenizer("bytes", BYTES + 1, BYTES)


def of_file(path: Path, token: str | None = None) -> Tokenizer:
    """Read a tokenizer.json."""
    try:
        content = content_of(path).decode()
    except UnicodeDecodeError:
        raise DataError(f"{path} is no {FILE}: it is not UTF-8") from None
    return _of_content(content, str(path), token)


def _of_content(content: str, name: str, token: str | None = None) -> Tokenizer:
    """Make a tokenizer from the text of a tokenizer.json; see `of_file`."""
    try:
        tokenizer = loaded(content)
    except DataError:
        raise
    except Exception as error:  # the library raises bare Exceptions
        raise DataError(f"{name} is no {FILE} of Hugging Face tokenizers: {error}") from None
    end = _end(tokenizer, name, token)
    # The number of entries is not enough: ids may have gaps.
    highest = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
    if highest < 0:
        raise DataError(f"{name} has no tokens")
    return Tokenizer(name, highest + 1, end, content)


def trained(texts: Iterator[str], vocabulary: int, name: str, *, quiet: bool) -> Tokenizer:
    """Train a byte-level BPE. The same text gives the same one."""
    if not _SMALLEST <= vocabulary <= 2**24:
        raise ConfigError(
            f"--train-bpe {vocabulary}: a vocabulary has {_SMALLEST} tokens (every byte, and the "
            f"end of a document) to {2**24}"
        )
    first = next(texts, None)
    if first is None:
        raise DataError(f"{name}: no text to train a tokenizer on")
    if not quiet:
        print(f"training a tokenizer of {vocabulary} tokens", file=sys.stderr, flush=True)
    tokenizers = library("tokenizers", name="the library tokenizers")
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[_EOD],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(chain([first], texts), trainer)
    tokenizer = _of_content(made.to_str(pretty=True), f"BPE of {vocabulary} tokens, {name}", _EOD)
    if tokenizer.vocabulary < vocabulary and not quiet:
        print(
            f"the text gives {tokenizer.vocabulary} tokens, less than --train-bpe {vocabulary}",
            file=sys.stderr,
        )
    return tokenizer


def _end(tokenizer: Any, name: str, token: str | None) -> int:
    if token is None:
        known = [end for end in _EODS if tokenizer.token_to_id(end) is not None]
        if len(known) != 1:
            has = f"has {' and '.join(known)}" if known else f"has none of {', '.join(_EODS)}"
            raise ConfigError(f"{name}: which token ends a document? It {has}; give --eod TOKEN")
        token = known[0]
    found: int | None = tokenizer.token_to_id(token)
    if found is None:
        raise ConfigError(f"--eod {token!r}: {name} has no such token")
    return found
