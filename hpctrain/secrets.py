"""Keep secrets of the environment out of files, MLflow and logs.

    HF_TOKEN=hf_abc… in the shell ── +model.token=${oc.env:HF_TOKEN} ── the model gets hf_abc…
                                        │
        reference()                     ├── config.yaml, sweep.json, MLflow: ${oc.env:HF_TOKEN}
        mask()                          └── logs, errors, run.json, the terminal: ***

A variable is secret by its name (`PATTERNS`; HPCTRAIN_SECRETS="NAME,PREFIX_*" adds patterns), or
because its value looks like a token of a known service (`hpctrain.secret_text`). Its value is then
replaced in everything that hpctrain writes, also in base64 and as JSON, HTML or a URL escape it.
Exceptions: a value of fewer than six characters, which would occur everywhere; a path that exists,
which is not confidential; the address of a database without a password; a number in a config. The
output of your own `print` is not changed.
"""

import base64
import fnmatch
import functools
import html
import json
import logging
import os
import re
import shlex
import urllib.parse
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from hpctrain import secret_text
from hpctrain.terminal import harmless

PATTERNS = (
    *("*SECRET*", "*PASSWORD*", "*PASSWD*", "*PASSPHRASE*", "*CREDENTIAL*", "*JWT*"),
    *("PASS", "*_PASS", "*_PWD", "*_PW", "*BINDPW", "*_PSK", "*PASSCODE*", "SSHPASS", "*_CREDS"),
    *("GITHUB_*PAT", "GH_*PAT", "GITLAB_*PAT", "AZURE_*PAT", "COOKIE", "*_COOKIE", "*_COOKIES"),
    *("*AUTH_CONFIG*", "*_AUTH", "*AUTHORIZATION*", "*_AUTH_HEADER", "*BEARER*", "*_SAS"),
    *("*API_KEY*", "*APIKEY*", "*ACCESS_KEY*", "*PRIVATE_KEY*", "*STORAGE_KEY*", "*ACCOUNT_KEY*"),
    *("*AUTH_KEY*", "*SIGNING_KEY*", "*ENCRYPTION_KEY*", "*MASTER_KEY*", "*LICENSE_KEY*"),
    *("*CONNECTION_STRING*", "*CONN_STR*", "*WEBHOOK*"),
)
_SERVICE_KEYS = (
    r"|(?s:.*(?:OPENAI|ANTHROPIC|MISTRAL|COHERE|GROQ|GEMINI|HF|WANDB|KAGGLE|COMET|NEPTUNE|S3|AWS|GCS"
    r"|MINIO|AZURE|DEPLOY|SSH|HMAC|SESSION|SERVICE|CLIENT|ADMIN|FERNET|VAULT|STRIPE)_KEY)\Z"
)
_KEY = re.compile(r".*_KEY", re.IGNORECASE)  # a secret only if its value looks random
_ADDRESSES = ("*DATABASE_URL*", "*_DSN", "*BROKER_URL*", "*REDIS_URL*", "*MONGO*_UR[IL]")
"""The names of addresses, which are secret only if they have a password."""
_TOKEN = r"(?s:.*TOKEN(?!I[SZ]).*)\Z"  # HF_TOKEN_2, but not TOKENIZER
COUNTED = (
    *("max", "min", "n", "num", "total", "new", "train", "val", "valid", "test", "eval", "batch"),
    *("prompt", "input", "output", "context", "special", "extra", "stop", "seen", "target"),
    *("global", "micro", "warmup", "completion", "generated", "cached", "seq", "per_step"),
)
_ROLES = ("pad", "bos", "eos", "eod", "eot", "unk", "sep", "cls", "mask", "start", "end", "stop")
_HARMLESS = (
    *("TOKENS", "TOKENS_*", "*_TOKENS_*"),  # TOKENS_PER_STEP
    *(f"{word}_TOKENS" for word in COUNTED),
    *(f"*_{word}_TOKENS" for word in COUNTED),
    *(f"{role}_TOKEN{end}" for role in _ROLES for end in ("", "_ID", "S", "_IDS")),
    *(f"TOKENIZER_{role}_TOKEN*" for role in _ROLES),
)
"""The names of numbers and words of a language model: not secret because of TOKEN alone."""
_SHORTEST = 6
MASK = secret_text.MASK
TOKEN_STARTS = secret_text.TOKEN_STARTS
tokens = secret_text.tokens
without_credentials = secret_text.without_credentials


def is_secret(name: str) -> bool:
    """Return whether a variable of this name holds a secret."""
    return _names(os.environ.get("HPCTRAIN_SECRETS", "")).match(name) is not None


@functools.cache
def _names(added: str) -> re.Pattern[str]:
    tokens = f"(?!{_either(_HARMLESS)})(?:{_TOKEN})"
    theirs = _either(filter(None, re.split(r"[,\s]+", added)))
    return re.compile(f"{theirs}|{_either(PATTERNS)}{_SERVICE_KEYS}|{tokens}", re.IGNORECASE)


def _either(patterns: Iterable[str]) -> str:
    return "|".join(map(fnmatch.translate, patterns)) or r"(?!)"


_RANDOM = re.compile(r"(?=.*\d)(?=.*[A-Za-z])[\w\-.+/=~]{12,}")
_ADDRESS = re.compile(_either(_ADDRESSES), re.IGNORECASE)
_CLEAR = re.compile(_either(PATTERNS) + _SERVICE_KEYS, re.IGNORECASE)


def is_telling(value: str) -> bool:
    """Return whether the value of a secret variable has to be hidden."""
    return len(value) >= _SHORTEST and not (value.startswith("/") and os.path.exists(value))


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
        if name != "HPCTRAIN_SECRETS" and _holds_secret(name, value)
    }
    # A value that begins with another one is replaced first.
    return dict(sorted(found.items(), key=lambda item: -len(item[0])))


def _holds_secret(name: str, value: str) -> bool:
    if secret_text.is_token(value):
        return True
    if _ADDRESS.match(name) and not is_secret(name):
        return next(secret_text.in_url(value, is_secret), None) is not None
    if _KEY.fullmatch(name) and _RANDOM.fullmatch(value):
        return is_telling(value)
    return is_secret(name) and is_telling(value)


def mask(text: str) -> str:
    """Return the text with `***` for every secret, in every form of `_forms`.

    These are the secrets of the environment, and what looks like a secret: credentials in URLs,
    tokens of known services, and private keys.
    """
    for form in _forms(tuple(known())):
        text = text.replace(form, MASK)
    return secret_text.mask(text, is_secret)


@functools.lru_cache(maxsize=2)
def _forms(values: tuple[str, ...]) -> list[str]:
    """Return each value as programs write it, the longest first."""
    found = set(values)
    for value in values:
        raw = value.encode(errors="surrogateescape")
        found |= {repr(value)[1:-1], repr(raw)[2:-1], html.escape(value), raw.hex()}
        found |= {json.dumps(value, ensure_ascii=ascii)[1:-1] for ascii in (True, False)}
        found |= {quote(raw, safe="") for quote in (urllib.parse.quote, urllib.parse.quote_plus)}
        found.add(urllib.parse.quote(raw))
        for before in range(3):  # in base64, also of `user:VALUE`
            code = base64.b64encode(bytes(before) + raw).decode()
            code = code[(0, 2, 3)[before] : (before + len(raw)) * 8 // 6]
            found |= {code, code.translate(_URL_SAFE)} if len(code) >= _SHORTEST_CODE else set()
    return sorted(found, key=len, reverse=True)


_SHORTEST_CODE = 8
_URL_SAFE = str.maketrans("+/", "-_")


def reference(
    text: str,
    keep: Callable[[str], str] = str,
    values: Mapping[str, str] | None = None,
) -> str:
    """Return the text with `${oc.env:NAME}` for every secret. OmegaConf resolves it when reading.

    `keep` is applied to the parts between the secrets. Give `values` of `known` with many texts.
    """
    return _replace(text, keep, "${{oc.env:{}}}".format, known() if values is None else values)


def referenced(node: Any, values: Mapping[str, str] | None = None) -> Any:
    """Return a value of a config, also a dict or a list, with every text as by `reference`."""
    values = known() if values is None else values
    if isinstance(node, dict):
        return {referenced(key, values): referenced(item, values) for key, item in node.items()}
    if isinstance(node, list | tuple):
        return [referenced(item, values) for item in node]
    return reference(node, values=values) if isinstance(node, str) else node


def expand(text: str) -> str:
    """Undo `reference`, for files that OmegaConf does not read. They must be your own."""
    return re.sub(r"\$\{oc\.env:(\w+)\}", lambda m: os.environ.get(m[1], m[0]), text)


def expand_password(url: str) -> str:
    """Undo `reference` in the password of a URL, and nowhere else."""
    place = re.match(r"[\w+.\-]+://[^/\s:@]*:(\$\{oc\.env:\w+\})@", url)
    return url if place is None else url.replace(place[1], expand(place[1]), 1)


def shell_word(text: str) -> str:
    """Quote the text for a shell script. A secret becomes `"${NAME}"`, which the job inherits."""
    return _replace(text, shlex.quote, '"${{{}}}"'.format, known()) or "''"


def is_given_away(name: str, value: str) -> bool:
    """Return whether `NAME = "value"` in a file gives a secret away.

    `eos_token = "</s>"` does not: what is only named a token must also look random.
    """
    if not is_secret(name) or len(value) < _SHORTEST or re.match(r"[$<\[{(%/]|\*+$", value):
        return False
    return _RANDOM.fullmatch(value) is not None or _CLEAR.match(name) is not None


def written_down(text: str) -> list[str]:
    """Return what looks like a secret in a text: credentials in its URLs, and tokens."""
    return [*secret_text.in_url(text, is_secret), *secret_text.tokens(text)]


class _Masking(logging.Formatter):
    """Masks the output of another formatter, including tracebacks, and makes it harmless."""

    def __init__(self, inner: logging.Formatter | None) -> None:
        self._inner = inner or logging.Formatter()

    def format(self, record: logging.LogRecord) -> str:
        return harmless(mask(self._inner.format(record)))


def mask_logging() -> None:
    """Make every handler of the root logger mask its output, without control characters."""
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
