"""The names that MLflow allows.

    acc@1 ── acc_1      a//b/ ── a/b      300 characters ── 241 of them and a digest

MLflow takes letters, digits, `_`, `-`, `.`, blanks, `:` and `/`, at most 250 characters.
"""

import hashlib
import posixpath
import re

_LONGEST = 250


def clean_key(key: str) -> str:
    """Return `key` with only characters that MLflow allows: `acc@1` becomes `acc_1`."""
    key = posixpath.normpath(re.sub(r"[^/\w.\- :]", "_", key)).lstrip("/")
    if key in ("", ".") or key.startswith(".."):
        key = f"_{key}"
    if len(key) > _LONGEST:
        key = f"{key[: _LONGEST - 9]}-{hashlib.sha256(key.encode()).hexdigest()[:8]}"
    return key
