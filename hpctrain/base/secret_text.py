"""Find the secrets in URLs, which the environment need not have; `base.secrets` knows its own.

https://me:p@ss@host/x?private_token=abc      https://me:***@host/x?private_token=***
s3://KEY:se/cret@bucket                       s3://KEY:***@bucket
"""

import re
from collections.abc import Callable, Iterator

MASK = "***"
_URL = re.compile(r"(?P<scheme>[A-Za-z][\w+.\-]*)://(?P<rest>[^\s\"'<>`]+)")
_PARAMETER = re.compile(r"[?&;](?P<name>[\w.\-]+)=(?P<value>[^&;#]+)")
_SIGNED = re.compile(r"sig|.*signature|auth|authorization|pwd|pass", re.IGNORECASE)
_TOKEN = re.compile(r"(?=.*\d)(?=.*[A-Za-z])[\w\-]{20,}")  # in the user's place
# What follows the colon cannot be a port.
_OBJECT_STORES = frozenset(
    ("s3", "s3a", "s3n", "gs", "gcs", "az", "adl", "abfs", "abfss", "wasb", "wasbs", "oss", "hf")
)


def mask(text: str, is_secret: Callable[[str], bool]) -> str:
    """Return the text with `***` for every secret in its URLs.

    `is_secret` tells from the name of a URL's parameter whether its value is one.
    """
    if "://" not in text:
        return text
    parts, at = list[str](), 0
    for begin, end in sorted({*_spans(text, is_secret)}):
        if begin >= at:
            parts += [text[at:begin], MASK]
            at = end
    return "".join([*parts, text[at:]])


def in_url(text: str, is_secret: Callable[[str], bool]) -> Iterator[str]:
    """Yield the passwords, and the values of secret parameters, of the URLs in a text."""
    if "://" in text:
        yield from (text[begin:end] for begin, end in _spans(text, is_secret))


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


def _spans(text: str, is_secret: Callable[[str], bool]) -> Iterator[tuple[int, int]]:
    """Yield where secrets begin and end. References such as `${oc.env:NAME}` are none."""
    for url in _URL.finditer(text):
        at, rest = url.start("rest"), url["rest"]
        end = _userinfo(url["scheme"], rest)
        user, colon, password = rest[:end].partition(":")
        if password and not password.startswith("${"):
            yield at + len(user) + 1, at + end
        elif not colon and _TOKEN.fullmatch(user):
            yield at, at + end
        for found in _PARAMETER.finditer(rest, end):
            secret = _SIGNED.fullmatch(found["name"]) or is_secret(found["name"])
            if secret and not found["value"].startswith("${"):
                yield at + found.start("value"), at + found.end("value")
        # "http://a,http://b" is one match.
        yield from ((at + end + a, at + end + b) for a, b in _spans(rest[end:], is_secret))


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
