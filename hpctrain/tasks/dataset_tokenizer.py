"""The tokenizer of a data set that `python -m data_prep` wrote.

    index.json (provenance) ── bytes, or tokenizer.json beside it ── DatasetTokenizer
                                                                       │
                              vocabulary, byte_lengths (for bits per byte), encode, decode

A field of uint8 needs no tokenizer: its tokens are the bytes of UTF-8. Only `encode` and `decode`
need Hugging Face's library `tokenizers`.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import numpy as np

from hpctrain.base.errors import DataError
from hpctrain.base.files.disk import parse_json
from hpctrain.data.places.origin import Origin, read_blocks
from hpctrain.data.places.placement import load_index
from hpctrain.data.shards.types import Int64s
from hpctrain.data.tokenizer import BYTES, FILE, loaded

_BYTE = re.compile(r"<0x[0-9A-F]{2}>")


@dataclass(frozen=True)
class DatasetTokenizer:
    """How the text of a data set became tokens, which are 0 to vocabulary - 1.

    `name` says where it comes from, for messages. `eod` ends each document, if it is not None.
    `content` is the text of tokenizer.json; "" if the tokens are the bytes of UTF-8.
    """

    name: str
    vocabulary: int
    eod: int | None
    content: str = ""

    @classmethod
    def of(cls, source: str | Path, field: str) -> Self:
        """Read the tokenizer of the data set whose variable-length `field` holds the tokens."""
        index = load_index(source)
        spec = index.fields.get(field)
        if spec is not None and spec.variable and spec.dtype == "uint8":
            return cls(str(source), BYTES, None)
        about = dict(index.provenance.get("source", {})).get("tokenizer")
        if spec is None or not spec.variable or not isinstance(about, Mapping):
            raise DataError(
                f"{source}: {field!r} is no field of tokens: the provenance has no tokenizer, and "
                "it is not of variable-length uint8 (bytes); `python -m data_prep text` writes one"
            )
        content = "" if about["name"] == "bytes" else _content(source)
        return cls(str(source), int(about["vocabulary"]), about["eod"], content)

    def byte_lengths(self) -> Int64s:
        """Return how many bytes of text each token stands for, (vocabulary,).

        Special tokens and unused ids have none. Some kinds of tokenizers do not tell: a DataError.
        """
        lengths = np.zeros(self.vocabulary, np.int64)
        if not self.content:
            lengths[:BYTES] = 1
            return lengths
        decoders = set(_types(self._parsed.get("decoder")))
        for token, number in self._entries():
            if "ByteLevel" in decoders:
                lengths[number] = len(token)  # each byte is one printable character
            elif "ByteFallback" in decoders:
                lengths[number] = 1 if _BYTE.fullmatch(token) else _spaces_length(token)
            else:
                raise DataError(
                    f"{self.name}/{FILE}: bits per byte need a byte-level tokenizer, or one with "
                    f"byte fallback; its decoder has {', '.join(sorted(decoders)) or 'no type'}"
                )
        for added in self._parsed.get("added_tokens", []):
            lengths[added["id"]] = 0 if added["special"] else len(added["content"].encode())
        return lengths

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text, without an end of document."""
        if not self.content:
            return list(text.encode())
        ids: list[int] = self._library.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens; incomplete characters give U+FFFD, special tokens nothing."""
        if not self.content:
            return bytes(token for token in tokens if token < BYTES).decode(errors="replace")
        text: str = self._library.decode(list(tokens), skip_special_tokens=True)
        return text

    def _entries(self) -> list[tuple[str, int]]:
        """Return the tokens of the model with their ids."""
        vocab = self._parsed["model"]["vocab"]
        if isinstance(vocab, dict):
            return list(vocab.items())
        return [(entry[0], number) for number, entry in enumerate(vocab)]  # Unigram has scores

    @cached_property
    def _parsed(self) -> dict[str, Any]:
        try:
            parsed: dict[str, Any] = parse_json(self.content)
            parsed["model"]["vocab"]
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(f"{self.name}/{FILE} is damaged: {error!r}") from None
        return parsed

    @cached_property
    def _library(self) -> Any:
        return loaded(self.content)


def _types(decoder: Any) -> list[str]:
    if not isinstance(decoder, Mapping):
        return []
    inner = [name for part in decoder.get("decoders", []) for name in _types(part)]
    return [str(decoder.get("type")), *inner]


def _spaces_length(token: str) -> int:
    return len(token.replace("\N{LOWER ONE EIGHTH BLOCK}", " ").encode())


def _content(source: str | Path) -> str:
    try:
        return b"".join(map(bytes, read_blocks(Origin(source), FILE))).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{source}/{FILE} cannot be read: {error}") from None
