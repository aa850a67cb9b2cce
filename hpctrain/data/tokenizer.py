"""A tokenizer.json, as `python -m data_prep text` writes it beside the shards."""

from functools import lru_cache
from typing import Any

from hpctrain.base.errors import DataError

FILE = "tokenizer.json"
BYTES = 256  # tokens that are the bytes of UTF-8 need no such file


@lru_cache(maxsize=2)
def loaded(content: str) -> Any:
    """Return the tokenizer of Hugging Face's library with the text of a tokenizer.json."""
    try:
        import tokenizers
    except ImportError:
        raise DataError(
            f"{FILE} needs the library tokenizers: pip install 'hpctrain[prep]'"
        ) from None
    tokenizer = tokenizers.Tokenizer.from_str(content)
    # A model's file may ask for truncated or padded documents, or for text like "</s>" to become
    # the special token. None of these must happen here.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True
    return tokenizer
