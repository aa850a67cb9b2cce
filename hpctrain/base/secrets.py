"""Keep secrets of the environment out of files, MLflow and logs.

    HF_TOKEN=hf_abc… in the shell ── +model.token=${oc.env:HF_TOKEN} ── the model gets hf_abc…
                                        │
        reference()                     ├── config.yaml, sweep.json, MLflow: ${oc.env:HF_TOKEN}
        mask()                          └── logs, errors, run.json, the terminal: ***

A variable is secret by its name (HPCTRAIN_SECRETS="NAME,PREFIX_*" adds patterns). Its value is then
replaced in everything that hpctrain writes, also in base64 and as JSON, HTML or a URL escape it.
Exceptions: a value of fewer than six characters, which would occur everywhere; a path that exists,
which is not confidential; the address of a database without a password; a number in a config. The
output of your own `print` is not changed.

Secrets in URLs are found, too, which the environment need not have:

    https://me:p@ss@host/x?private_token=abc      https://me:***@host/x?private_token=***
    s3://KEY:se/cret@bucket                       s3://KEY:***@bucket
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
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from hpctrain.base.terminal.terminal import harmless

_ALWAYS = (
    r".*(?:SECRET|PASSWORD|PASSWD|PASSPHRASE|PASSCODE|CREDENTIAL|JWT|COOKIE|BEARER|WEBHOOK).*"
    r"|.*(?:AUTH_CONFIG|AUTHORIZATION|API_?KEY|(?:ACCESS|PRIVATE|STORAGE|ACCOUNT|AUTH|SIGNING)_KEY).*"
    r"|.*(?:ENCRYPTION_KEY|MASTER_KEY|CONNECTION_STRING|CONN_STR|BINDPW).*"
    r"|PASS|SSHPASS|.*_(?:PASS|PWD|PW|PSK|CREDS|AUTH|SAS)|(?:GITHUB|GH|GITLAB|AZURE)_.*PAT"
)
# HF_TOKEN_2, but not TOKENIZER, nor the numbers and words of a language model.
_TOKEN = (
    r"(?!TOKENS(?:_.*)?\Z|.*_TOKENS_"
    r"|(?:.*_)?(?:MAX|MIN|N|NUM|TOTAL|NEW|TRAIN|VAL|TEST|EVAL|BATCH|PROMPT|INPUT|OUTPUT|SEQ)_TOKENS\Z"
    r"|(?:.*_)?(?:PAD|BOS|EOS|EOD|EOT|UNK|SEP|CLS|MASK|START|END|STOP)_TOKEN(?:S|_IDS?)?\Z)"
    r".*TOKEN(?!I[SZ]).*"
)
_ADDRESS = re.compile(r".*DATABASE_URL.*|.*_DSN|.*(?:BROKER|REDIS)_URL.*|.*MONGO.*_UR[IL]", re.I)
"""The names of addresses, which are secret only if they have a password."""
_KEY = re.compile(r".*_KEY", re.IGNORECASE)  # a secret only if its value looks random
_RANDOM = re.compile(r"(?=.*\d)(?=.*[A-Za-z])[\w\-.+/=~]{12,}")
_SHORTEST = 6
MASK = "***"
_URL = re.compile(r"(?P<scheme>[A-Za-z][\w+.\-]*)://(?P<rest>[^\s\"'<>`]+)")
_PARAMETER = re.compile(r"[?&;](?P<name>[\w.\-]+)=(?P<value>[^&;#]+)")
_SIGNED = re.compile(r"sig|.*signature|auth|authorization|pwd|pass", re.IGNORECASE)
_USER_TOKEN = re.compile(r"(?=.*\d)(?=.*[A-Za-z])[\w\-]{20,}")  # in the user's place
# What follows the colon cannot be a port.
_OBJECT_STORES = frozenset(
    ("s3", "s3a", "s3n", "gs", "gcs", "az", "adl", "abfs", "abfss", "wasb", "wasbs", "oss", "hf")
)


def is_secret(name: str) -> bool:
    """Return whether a variable of this name holds a secret."""
    return _names(os.environ.get("HPCTRAIN_SECRETS", "")).match(name) is not None


@functools.cache
def _names(added: str) -> re.Pattern[str]:
    theirs = map(fnmatch.translate, filter(None, re.split(r"[,\s]+", added)))
    return re.compile("|".join([*theirs, rf"(?s:{_ALWAYS}|{_TOKEN})\Z"]), re.IGNORECASE)


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
    if _ADDRESS.match(name) and not is_secret(name):
        return bool(written_down(value))
    if _KEY.fullmatch(name) and _RANDOM.fullmatch(value):
        return is_telling(value)
    return is_secret(name) and is_telling(value)


def mask(text: str) -> str:
    """Return the text with `***` for the secrets of the environment, in every form of `_forms`.

    Credentials in URLs are masked, too.
    """
    for form in _forms(tuple(values)) if (values := known()) else ():
        text = text.replace(form, MASK)
    return _mask_urls(text) if "://" in text else text


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
    text: str, keep: Callable[[str], str] = str, values: Mapping[str, str] | None = None
) -> str:
    """Return the text with `${oc.env:NAME}` for every secret. OmegaConf resolves it when reading.

    `keep` is applied to the parts between the secrets. Give `values` of `known` with many texts.
    """
    return _replace(text, keep, "${{oc.env:{}}}".format, known() if values is None else values)


def referenced(
    node: Any, values: Mapping[str, str] | None = None, keep: Callable[[str], str] = str
) -> Any:
    """Return a value of a config, also a dict or a list, with every text as by `reference`.

    OmegaConf does not resolve the keys of a dict, so `keep` is not applied to them.
    """
    values = known() if values is None else values
    if isinstance(node, dict):
        return {
            referenced(key, values): referenced(item, values, keep) for key, item in node.items()
        }
    if isinstance(node, list | tuple):
        return [referenced(item, values, keep) for item in node]
    return reference(node, keep, values) if isinstance(node, str) else node


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


def written_down(text: str) -> list[str]:
    """Return the credentials in the URLs of a text."""
    return [text[begin:end] for begin, end in _spans(text)] if "://" in text else []


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


def _mask_urls(text: str) -> str:
    """Return the text with `***` for every secret in its URLs."""
    parts, at = list[str](), 0
    for begin, end in sorted({*_spans(text)}):
        if begin >= at:
            parts += [text[at:begin], MASK]
            at = end
    return "".join([*parts, text[at:]])


def without_credentials(url: str) -> str:
    """Return a URL without user, password, query and fragment.

    >>> without_credentials("https://me:p@ss@host/x.git?private_token=abc")
    'https://host/x.git'
    """
    scheme, separator, rest = url.partition("://")
    if not separator:
        return url
    end = _userinfo(scheme, rest)
    rest = rest[end + 1 :] if end else rest
    return f"{scheme}://{re.split('[?#]', rest, maxsplit=1)[0]}"


def _spans(text: str) -> Iterator[tuple[int, int]]:
    """Yield where secrets begin and end. References such as `${oc.env:NAME}` are none."""
    for url in _URL.finditer(text):
        at, rest = url.start("rest"), url["rest"]
        end = _userinfo(url["scheme"], rest)
        user, colon, password = rest[:end].partition(":")
        if password and not password.startswith("${"):
            yield at + len(user) + 1, at + end
        elif not colon and _USER_TOKEN.fullmatch(user):
            yield at, at + end
        for found in _PARAMETER.finditer(rest, end):
            secret = _SIGNED.fullmatch(found["name"]) or is_secret(found["name"])
            if secret and not found["value"].startswith("${"):
                yield at + found.start("value"), at + found.end("value")
        # "http://a,http://b" is one match.
        yield from ((at + end + a, at + end + b) for a, b in _spans(rest[end:]))


def _userinfo(scheme: str, rest: str) -> int:
    """Return where `user:password` ends in a URL `scheme://rest`: at its last `@`; 0 without one.

    People write passwords with `/` and `@` into URLs, although they should be escaped there.
    """
    authority = re.split("[/?#]", rest, maxsplit=1)[0]
    _, colon, port = re.sub(r"^\[[^\]]*\]", "", authority).partition(":")  # [::1]:5000
    if "@" in authority:
        end = authority.rindex("@")
        if ":" in authority[:end]:
            # To the last one in the path: rather hide a host than show half of a password. But in
            # https://host/@scope/name no password ends.
            path = re.split(r"[?#]|[,;|]\w+://", rest, maxsplit=1)[0]
            end = [at.start() for at in re.finditer(r"(?<!/)@", path)][-1]
    elif colon and "@" in rest and (scheme.lower() in _OBJECT_STORES or not port.isdecimal()):
        # A colon and no port after it: the password has a slash.
        end = rest.rindex("@")
    else:
        return 0
    return 0 if rest.startswith("sha256:", end + 1) else end  # docker://image:tag@sha256:…
