"""The names that MLflow allows, and which of ours become others there.

    acc@1 ── acc_1      a//b/ ── a/b      300 characters ── 241 of them and a digest

MLflow takes letters, digits, `_`, `-`, `.`, blanks, `:` and `/`, at most 250 characters.
"""

import hashlib
import posixpath
import re
from collections.abc import Iterable

_LONGEST = 250


def clean_key(key: str) -> str:
    """Return `key` with only characters that MLflow allows: `acc@1` becomes `acc_1`."""
    key = posixpath.normpath(re.sub(r"[^/\w.\- :]", "_", key)).lstrip("/")
    if key in ("", ".") or key.startswith(".."):
        key = f"_{key}"
    if len(key) > _LONGEST:
        key = f"{key[: _LONGEST - 9]}-{hashlib.sha256(key.encode()).hexdigest()[:8]}"
    return key


class Renamed:
    """The names of the metrics of a run that MLflow does not allow."""

    def __init__(self) -> None:
        self.known: dict[str, str] = {}

    def look(self, names: Iterable[str]) -> list[str]:
        """Return a text for each new name that has another one in MLflow: `acc@1 is acc_1`."""
        told = []
        for name in names:
            if name in self.known:
                continue
            there = clean_key(name)
            same = [each for each, other in self.known.items() if other == there]
            self.known[name] = there
            if same:
                told.append(f"{name} is {there}, as {same[0]} is, so their values are mixed there")
            elif there != name:
                told.append(f"{name} is {there}")
        return told

    def text(self) -> str:
        """Return all of them: `acc@1 is acc_1; a//b is a/b`."""
        return "; ".join(
            f"{name} is {there}" for name, there in self.known.items() if name != there
        )
