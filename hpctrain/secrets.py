"""Keep secrets of the environment out of files, MLflow and logs.

    HF_TOKEN=hf_abc… in the shell ── +model.token=${oc.env:HF_TOKEN} ── the model gets hf_abc…
                                        │
        reference()                     ├── config.yaml, sweep.json, MLflow: ${oc.env:HF_TOKEN}
        mask()                          └── logs, errors, run.json, the terminal: ***

A variable is secret by its name (`PATTERNS`; HPCTRAIN_SECRETS="NAME,PREFIX_*" adds patterns). Its
value is then replaced in everything that hpctrain writes. Exceptions: a value of fewer than six
characters, which would occur everywhere; a path that exists, which is not confidential; a number in
a config. The output of your own `print` is not changed.
"""

from __future__ import annotations

import fnmatch
import functools
import json
import logging
import os
import re
import shlex
import urllib.parse
from collections.abc import Callable, Iterable, Mapping

PATTERNS = (
    *("*TOKEN*", "*SECRET*", "*PASSWORD*", "*PASSWD*", "*PASSPHRASE*", "*CREDENTIAL*"),
    *("*API_KEY*", "*APIKEY*", "*ACCESS_KEY*", "*PRIVATE_KEY*"),
)
HARMLESS = ("*TOKENIZER*", "*TOKENS*")  # TOKENIZERS_PARALLELISM, MAX_TOKENS
SHORTEST = 6
MASK = "***"

_IN_URL = re.compile(r"(\w://[^/\s:@]*:)([^/\s@]+)(?=@)")


def is_secret(name: str) -> bool:
    """Return whether a variable of this name holds a secret."""
    return _names(os.environ.get("HPCTRAIN_SECRETS", "")).match(name) is not None


@functools.cache
def _names(added: str) -> re.Pattern[str]:
    def either(patterns: Iterable[str]) -> str:
        return "|".join(map(fnmatch.translate, patterns)) or r"(?!)"

    ours = f"(?!{either(HARMLESS)})(?:{either(PATTERNS)})"
    theirs = either(filter(None, re.split(r"[,\s]+", added)))
    return re.compile(f"{theirs}|{ours}", re.IGNORECASE)


def is_telling(value: str) -> bool:
    """Return whether the value of a secret variable has to be hidden."""
    return len(value) >= SHORTEST and not (value.startswith("/") and os.path.exists(value))


def known() -> Mapping[str, str]:
    """Return the secret values of this process's environment, each with its variable's name."""
    # A sweep calls this thousands of times, and comparing the raw environment is fast.
    raw = getattr(os.environ, "_data", None)
    return _known(tuple((dict(os.environ) if raw is None else raw).items()))


@functools.lru_cache(maxsize=2)
def _known(environment: tuple[object, ...]) -> Mapping[str, str]:
    found = {
        value: name
        for name, value in sorted(os.environ.items(), reverse=True)
        if name != "HPCTRAIN_SECRETS" and is_secret(name) and is_telling(value)
    }
    # A value that begins with another one is replaced first.
    return dict(sorted(found.items(), key=lambda item: -len(item[0])))


def mask(text: str) -> str:
    """Return the text with `***` for every secret, also where Python, JSON or a URL escapes it."""
    values = known()
    forms = {
        form
        for value in values
        for form in (value, repr(value)[1:-1], json.dumps(value)[1:-1], urllib.parse.quote(value))
    }
    for form in sorted(forms, key=len, reverse=True):
        text = text.replace(form, MASK)
    return _IN_URL.sub(rf"\1{MASK}", text)


def reference(
    text: str,
    keep: Callable[[str], str] = str,
    values: Mapping[str, str] | None = None,
) -> str:
    """Return the text with `${oc.env:NAME}` for every secret. OmegaConf resolves it when reading.

    Args:
        text: A value of a config, or the text of a file with such values.
        keep: A function that is applied to the parts between the secrets.
        values: The result of `known`, to save time with many texts.
    """
    return _replace(text, keep, "${{oc.env:{}}}".format, known() if values is None else values)


def expand(text: str) -> str:
    """Undo `reference`, for files that OmegaConf does not read."""
    return re.sub(r"\$\{oc\.env:(\w+)\}", lambda m: os.environ.get(m[1], m[0]), text)


def shell_word(text: str) -> str:
    """Quote the text for a shell script. A secret becomes `"${NAME}"`, which the job inherits."""
    return _replace(text, shlex.quote, '"${{{}}}"'.format, known()) or "''"


def password_in_url(text: str) -> str | None:
    """Return the password of the first `scheme://user:password@host` in the text, or None."""
    found = _IN_URL.search(text)
    return found[2] if found else None


class _Masking(logging.Formatter):
    """Masks the output of another formatter, including tracebacks."""

    def __init__(self, inner: logging.Formatter | None) -> None:
        self._inner = inner or logging.Formatter()

    def format(self, record: logging.LogRecord) -> str:
        return mask(self._inner.format(record))


def mask_logging() -> None:
    """Make every handler of the root logger mask its output."""
    for handler in logging.getLogger().handlers:
        handler.setFormatter(_Masking(handler.formatter))


def _replace(
    text: str, keep: Callable[[str], str], name_as: Callable[[str], str], values: Mapping[str, str]
) -> str:
    if not any(value in text for value in values):
        return keep(text)
    parts = re.split(f"({'|'.join(map(re.escape, values))})", text)
    return "".join(
        name_as(values[part]) if part in values else keep(part) for part in parts if part
    )
