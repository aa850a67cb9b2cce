"""Files with a group per sample: /0000/x, /0001/x, …, of which the pattern /*/x takes all."""

import re
from collections.abc import Callable, Iterable

SHOWN = 3  # names that a message has
_WILD = re.compile(r"(\*|\?|\[[^\]/]+\])")

Match = tuple[str, tuple[str, ...]]
"""The path of an array, and the names of the groups in it, or for an array's own name what each
wildcard stands for: the same for the arrays of one sample."""


def has_wildcard(key: str) -> bool:
    """Return whether the key of an array is a pattern."""
    return bool(_WILD.search(key))


def expression(pattern: str) -> re.Pattern[str]:
    """Return a pattern as a regular expression with a group for each wildcard."""
    forms = {"*": "([^/]*)", "?": "([^/])"}
    parts = _WILD.split(pattern)
    parts[::2] = map(re.escape, parts[::2])
    parts[1::2] = [forms.get(part) or f"({part.replace('[!', '[^')})" for part in parts[1::2]]
    return re.compile("".join(parts))


def matching(
    pattern: str, names: Callable[[str], Iterable[str]], has: Callable[[str], bool]
) -> tuple[list[Match], list[str]]:
    """Return what matches a pattern such as /rec_*/eeg, and the paths /rec_7 without an eeg."""
    if has(pattern):  # a name with a "*" in it
        return [(pattern, ())], []
    found: list[Match] = [("", ())]
    *_, last = parts = pattern.strip("/").split("/")
    for part in parts:
        name, at, attribute = part.rpartition("@")
        if not at or has_wildcard(attribute):
            name, at, attribute = part, "", ""
        if not has_wildcard(name):
            found = [(f"{path}/{part}", matched) for path, matched in found]
            continue
        whole, is_array = expression(name), part is last and not at
        found = [
            (
                f"{path}/{inner}{at}{attribute}",
                (*matched, *(match.groups() if is_array else [inner])),
            )
            for path, matched in found
            for inner in names(path)
            if (match := whole.fullmatch(inner))
        ]
    there = [each for each in found if has(each[0])]
    known = {path for path, _ in there}
    gone = [path for path, _ in found if path not in known]
    return there, [path for path in gone if "@" in last or [*names(path.rpartition("/")[0])]]
