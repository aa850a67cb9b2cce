"""Files with a group per sample: /0000/x, /0001/x, …, of which the pattern /*/x takes all."""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable

SHOWN = 3  # names that a message has
MANY = 10  # groups with the same array that look like samples
_NUMBER = re.compile(r"\d+")
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


def looks_like_groups(path: str, names: Iterable[str], key: str = "") -> tuple[int, str]:
    """Return how many groups of a file look like samples, and a sentence with the command."""
    found: dict[tuple[str, str], dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for name in names:
        parts = name.strip("/").split("/")
        for place, part in enumerate(parts):
            above, rest = "/".join(parts[:place]), "/".join(parts[place + 1 :])
            # Groups with the same array are samples; arrays, only if they are numbered.
            alike = "" if rest else _NUMBER.sub("#", part)
            if rest or alike != part:
                found[above, alike][rest].append(part)
    for (above, _), by_rest in found.items():
        samples = {rest: each for rest, each in by_rest.items() if len(each) >= MANY}
        if not samples:
            continue
        most = max(samples.values(), key=len)
        low, high = min(most), max(most)  # what these have in common, all have
        equal = [a == b for a, b in zip(low, high, strict=False)]
        common = low[: [*equal, False].index(False)].rstrip("0123456789")
        stem = f"{'/' * bool(above)}{above}/{common}*"
        keys = [
            f"{stem}{'/' * bool(rest)}{rest}"
            for rest, each in samples.items()
            if 2 * len(each) > len(most)
        ]
        if key and not any(expression(each).fullmatch(f"/{key.strip('/')}") for each in keys):
            continue
        return len(most), (
            f"{len(most):,} arrays at {keys[0]}, which look like a group per sample: `python "
            f"-m data_prep arrays OUT --field 'NAME={path}:{keys[0]}'` takes each as a sample"
        )
    return 0, ""


def one_of_many(path: str, names: Iterable[str], key: str, rows: int) -> tuple[bool, str]:
    """Return whether an array must be one of many samples, and what to say if it may be one."""
    many, text = looks_like_groups(path, names, key)
    said = f"{path}:{key} has {rows:,} rows, each of which would be a sample; the file has {text}"
    return many > rows, f"{said}; --axis NAME=0 takes the rows" if text else ""
