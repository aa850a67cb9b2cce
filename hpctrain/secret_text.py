"""Recognize secrets by their look: tokens of known services, credentials in URLs, private keys.

    ghp_ and 36 letters and digits                ***
    https://me:p@ss@host/x?private_token=abc      https://me:***@host/x?private_token=***
    s3://KEY:se/cret@bucket                       s3://KEY:***@bucket
    -----BEGIN PRIVATE KEY----- MIIEvQ…           -----BEGIN PRIVATE KEY----- ***

`hpctrain.secrets` knows the secrets of the environment by their values. This module finds those
that the environment does not have. It must not hide ordinary names such as `sk-learn-contrib`,
`max_tokens` or `hf_transformers`.
"""

import re
from collections.abc import Callable, Iterator

MASK = "***"

# Services give these prefixes to their tokens so that scanners find them.
_PREFIXED = (
    r"gh[pousr]_[A-Za-z0-9]{20,}",  # GitHub
    r"github_pat_[A-Za-z0-9_]{20,}",
    r"gl(?:pat|dt|rt|ptt|cbt|soat)-[A-Za-z0-9_\-]{16,}",  # GitLab
    r"hf_[A-Za-z0-9]{30,}",  # Hugging Face
    r"(?:AKIA|ASIA)[0-9A-Z]{16}(?![0-9A-Za-z])",  # AWS
    r"AIza[0-9A-Za-z_\-]{35}",  # Google
    r"xox[abeoprs]-[0-9A-Za-z\-]{10,}",  # Slack
    r"eyJ[A-Za-z0-9_\-]{8,}\.eyJ[A-Za-z0-9_\-]{8,}\.[A-Za-z0-9_\-]{8,}",  # JSON Web Tokens
    r"npm_[A-Za-z0-9]{30,}",
    r"pypi-Ag[A-Za-z0-9_\-]{16,}",
    r"[sr]k_(?:live|test)_[A-Za-z0-9]{10,}",  # Stripe
    r"whsec_[A-Za-z0-9+/=]{16,}",
    r"dapi[0-9a-f]{32}(?:-\d+)?",  # Databricks
    r"ya29\.[A-Za-z0-9_\-]{16,}",  # Google's OAuth
    r"SG\.[A-Za-z0-9_\-]{16,}\.[A-Za-z0-9_\-]{16,}",  # SendGrid
    r"dop_v1_[0-9a-f]{32,}",  # DigitalOcean
    r"(?:hvs|hvb)\.[A-Za-z0-9_\-]{20,}",  # Vault
    r"(?:nvapi-|gsk_|r8_|shpat_|xapp-|ATATT3|lin_api_|pplx-)[A-Za-z0-9_\-=]{24,}",
    # Who knows the address of a webhook may write there.
    r"https://hooks\.slack(?:-gov)?\.com/(?:services|workflows|triggers)/[\w/+\-]{10,}",
    r"https://(?:\w+\.)?discord(?:app)?\.com/api/webhooks/\d+/[\w\-]{10,}",
    r"https://[\w.\-]*(?:webhook\.office|logic\.azure|api\.powerplatform)\.com(?::\d+)?/[^\s\"'<>]{10,}",
    # OpenAI and others. A name such as sk-learn-contrib has no long word with digits in it.
    r"sk-(?:[A-Za-z0-9_]+-)*?(?=[A-Za-z]*[0-9])(?=[0-9]*[A-Za-z])[A-Za-z0-9]{16,}[A-Za-z0-9_\-]*",
)
_SHORTEST = 15  # characters of a token
TOKEN_STARTS = (
    *(b"ghp_", b"gho_", b"ghu_", b"ghs_", b"ghr_", b"github_pat_", b"glpat-", b"hf_", b"AKIA"),
    *(b"ASIA", b"AIza", b"xox", b"eyJ", b"sk-", b"npm_", b"pypi-Ag", b"k_live_", b"k_test_"),
    *(b"whsec_", b"dapi", b"ya29.", b"SG.", b"dop_v1_", b"hvs.", b"hvb.", b"nvapi-", b"gsk_"),
    *(b"r8_", b"shpat_", b"xapp-", b"ATATT3", b"lin_api_", b"pplx-", b"https://hooks.slack"),
    *(b"/api/webhooks/", b"webhook.office.com", b"logic.azure.com", b"api.powerplatform.com"),
)
"""The beginnings of the common tokens, to tell quickly that a large file has none."""
_TOKEN = re.compile(rf"(?:(?<![A-Za-z0-9])|(?<=%[0-9A-Fa-f]{{2}}))(?:{'|'.join(_PREFIXED)})")
_KEY_BLOCK = re.compile(
    r"(-----BEGIN (?P<kind>[A-Z ]*)PRIVATE KEY(?: BLOCK)?-----)(?P<body>.{1,32768}?)"
    r"(-----END (?P=kind)PRIVATE KEY)",
    re.DOTALL,
)
# The beginning of a key whose end is in another part of the text.
_KEY_START = re.compile(
    r"(-----BEGIN [A-Z ]*PRIVATE KEY(?: BLOCK)?-----)((?:(?:\\n|[\s+\-])*[A-Za-z0-9+/=]{40,76})+)"
)
# At the beginning of a line, + is a mark of a diff.
_KEY_TEXT = re.compile(r"[A-Za-z0-9/=][A-Za-z0-9+/=]{7,}")
# `Authorization: Bearer VALUE`, as in a header, a dict or an error of a library.
_HEADER = re.compile(
    r"((?i:\b(?:proxy-)?authorization['\"]?\s*[:=]\s*['\"]?(?:bearer|basic|token|digest)\s+"
    r"|\b(?:x-api-key|private-token|x-auth-token)['\"]?\s*[:=]\s*['\"]?"
    r"|\bbearer\s+(?=\S*\d)(?=\S{16})))(?![$*])[A-Za-z0-9\-._~+/=:]{6,}"
)
_URL = re.compile(r"(?P<scheme>[A-Za-z][\w+.\-]*)://(?P<rest>[^\s\"'<>`]+)")
_PARAMETER = re.compile(r"([?&;])([\w.\-]+)=([^&;#]+)")
_SIGNED = re.compile(r"sig|.*signature|auth|authorization|pwd|pass", re.IGNORECASE)
# What follows the colon cannot be a port.
_OBJECT_STORES = frozenset(
    ("s3", "s3a", "s3n", "gs", "gcs", "az", "adl", "abfs", "abfss", "wasb", "wasbs", "oss", "hf")
)


def tokens(text: str) -> Iterator[str]:
    """Yield the parts of a text that look like tokens of a known service."""
    if len(text) >= _SHORTEST:  # the values of thousands of configs are checked
        yield from (found[0] for found in _TOKEN.finditer(text))


def is_token(text: str) -> bool:
    """Return whether a whole text looks like a token of a known service."""
    return _TOKEN.fullmatch(text) is not None


def mask(text: str, is_secret: Callable[[str], bool]) -> str:
    """Return the text with `***` for everything that looks like a secret; lines stay lines.

    `is_secret` tells from the name of a URL's parameter whether its value is one.
    """
    if "PRIVATE KEY" in text:
        text = _KEY_BLOCK.sub(
            lambda found: found[1] + _KEY_TEXT.sub(MASK, found["body"]) + found[4], text
        )
        text = _KEY_START.sub(lambda found: found[1] + _KEY_TEXT.sub(MASK, found[2]), text)
    if "://" in text:
        text = _URL.sub(lambda found: _mask_url(found, is_secret), text)
    return _HEADER.sub(rf"\1{MASK}", _TOKEN.sub(MASK, text))


def in_url(text: str, is_secret: Callable[[str], bool]) -> Iterator[str]:
    """Yield the passwords, and the values of secret parameters, of the URLs in a text.

    References such as `${oc.env:NAME}` are not secret.
    """
    if "://" not in text:
        return
    for url in _URL.finditer(text):
        rest = url["rest"]
        end = _userinfo(url["scheme"], rest)
        _, colon, password = rest[:end].partition(":")
        if colon and password and not password.startswith("${"):
            yield password
        for _, name, value in _PARAMETER.findall(rest[end:]):
            if (_SIGNED.fullmatch(name) or is_secret(name)) and not value.startswith("${"):
                yield value
        yield from in_url(rest[end:], is_secret)  # "http://a,http://b" is one match


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


def _mask_url(url: re.Match[str], is_secret: Callable[[str], bool]) -> str:
    scheme, rest = url["scheme"], url["rest"]
    end = _userinfo(scheme, rest)
    user, colon, password = rest[:end].partition(":")
    if colon and password and not password.startswith("${"):
        password = MASK
    elif not colon and re.fullmatch(r"(?=.*\d)(?=.*[A-Za-z])[\w\-]{20,}", user):
        user = MASK  # a token in the user's place: https://TOKEN@host

    def masked(found: re.Match[str]) -> str:
        before, name, value = found.groups()
        secret = _SIGNED.fullmatch(name) or is_secret(name)
        return f"{before}{name}={MASK}" if secret and not value.startswith("${") else found[0]

    after = _URL.sub(lambda found: _mask_url(found, is_secret), rest[end:])
    return f"{scheme}://{user}{colon}{password}{_PARAMETER.sub(masked, after)}"


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
