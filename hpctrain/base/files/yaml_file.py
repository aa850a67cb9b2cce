"""Read YAML as it was written: one loader, with limits, for every file and every override.

YAML 1.1 reads `12:00:00` as 43200, `010` as 8 and `no` as false, and PyYAML does so in silence.
Here a number is what Python and the command line take for one, and true, false and null are what
they look like. What only some programs take for a number or a truth value stays the text that was
written where a key wants text, also as the name of a key; anywhere else it is an error with its
line. A key that stands twice, a tag, and a file that grows without end are errors, too.
"""

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import yaml

from hpctrain.base.errors import ConfigError
from hpctrain.base.files.disk import open_regular

LONGEST = 1 << 20  # bytes of a file
_MOST = 50_000  # values of a file, each alias counted with all that it stands for
_DEEPEST = 64  # values inside each other
_TAG = "tag:yaml.org,2002:"
_NULL = re.compile(r"(?:~|null|Null|NULL)?")
_BOOL = re.compile(r"true|True|TRUE|(?P<false>false|False|FALSE)")
_WORD = re.compile(r"(?:yes|on|(?P<false>no|off))", re.IGNORECASE)
_WHOLE = r"(?:0|[1-9](?:_?\d)*)"
_INT = re.compile(rf"[-+]?{_WHOLE}")
_EXPONENT = r"[eE][-+]?\d+"
_FLOAT = re.compile(
    rf"[-+]?(?:(?:{_WHOLE}\.(?:\d(?:_?\d)*)?|\.\d(?:_?\d)*)(?:{_EXPONENT})?|{_WHOLE}{_EXPONENT})"
)
_NO_NUMBER = re.compile(r"(?P<sign>[-+]?)\.?(?:(?P<inf>inf|infinity)|nan)", re.IGNORECASE)
_DISPUTED = re.compile(
    r"""(?i:yes|no|on|off|[-+]?(?:inf|infinity|nan))
    |[-+]?0(?:x[\da-f_]+|b[01_]+|o[0-7_]+)          # 0x1F
    |[-+]?\d[\d_]*(?::[0-5]?\d)+(?:\.[\d_]*)?       # 12:00:00
    |[-+]?(?:\d[\d_]*\.?[\d_]*|\.[\d_]+)(?:e[-+]?[\d_]+)?  # 010, 1__0
    """,
    re.VERBOSE | re.IGNORECASE,
)
TEXTS = ("str", "str | None", "list[str]", "list[str] | None", "dict[str, str]")


class _Composer(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """Makes the nodes of a file. A plain scalar without a tag is marked, and not resolved."""

    def resolve(self, kind: type, value: Any, implicit: Any) -> Any:
        if kind is yaml.ScalarNode:
            return "plain" if implicit[0] else f"{_TAG}str"
        return super().resolve(kind, value, implicit)


def conf_dir() -> Path:
    """Return the folder `conf`: in a checkout it is beside the package, in a wheel inside it."""
    package = Path(__file__).resolve().parents[2]
    inside = package / "conf"
    return inside if inside.is_dir() else package.parent / "conf"


def groups(conf: Path) -> dict[str, list[str]]:
    """Return the config groups and the names of their choices, in alphabetical order."""
    folders = (path for path in sorted(conf.iterdir()) if path.is_dir() and path.name != "hydra")
    return {folder.name: sorted(p.stem for p in folder.glob("*.yaml")) for folder in folders}


def read(path: Path, types: Mapping[str, str] | None = None) -> Any:
    """Return the value of a YAML file, as `parse` does; it may be a stranger's."""
    return parse(content(path), str(path), types)


def content(path: Path) -> bytes:
    """Return the bytes of a file for `parse`. ConfigError: it cannot be read (`open_regular`)."""
    try:
        with open_regular(path) as file:
            return file.read(LONGEST + 1)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from error


def parse(
    content: str | bytes, where: str, types: Mapping[str, str] | None = None, prefix: str = ""
) -> Any:
    """Return the value of a YAML text: dicts, lists, texts, numbers, truth values and None.

    Args:
        content: The text.
        where: What it is, for errors.
        types: The declared types of dotted keys, such as `{"name": "str"}`.
        prefix: The dotted key of the whole text; "" if it has the keys at the top.

    Raises:
        ConfigError: It is no YAML, or has what this loader refuses.
    """
    if len(content) > LONGEST:
        raise ConfigError(f"{where}: it is longer than {LONGEST:,} bytes")
    try:
        text = content.decode("utf-8-sig") if isinstance(content, bytes) else content
        node = _Composer(text).get_single_node()
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        raise ConfigError(f"{where}:{_why_not_yaml(error)}") from error
    return None if node is None else _Tree(where, types or {}).value(node, prefix)


def _why_not_yaml(error: Exception) -> str:
    mark = getattr(error, "problem_mark", None)
    place = "" if mark is None else f" line {mark.line + 1}:"
    said = (getattr(error, "context", None), getattr(error, "problem", None) or str(error))
    return f"{place} it is not YAML ({' '.join(' '.join(filter(None, said)).split())})"


def is_disputed(text: str) -> bool:
    """Return whether only some programs take a text for a number or a truth value."""
    plain = _INT.fullmatch(text) or _FLOAT.fullmatch(text)
    return not plain and _DISPUTED.fullmatch(text) is not None


def is_text(text: str) -> bool:
    """Return whether every program takes the text for a text, or for null."""
    return not (_DISPUTED.fullmatch(text) or _BOOL.fullmatch(text))


class _Tree:
    """Turns nodes into values; the arguments are those of `parse`."""

    def __init__(self, where: str, types: Mapping[str, str]) -> None:
        self._where, self._types, self._count = where, types, 0

    def value(self, node: Any, key: str, inherited: str = "", depth: int = 0) -> Any:
        """Return the value of a node; `inherited` is its type if its key declares none."""
        self._count += 1
        if self._count > _MOST or depth > _DEEPEST:
            most = f"{_DEEPEST} inside each other" if depth > _DEEPEST else f"{_MOST:,}"
            self._refuse(node, f"it has more values than {most}; each alias (*NAME) counts fully")
        declared = self._types.get(key, inherited)
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node, declared)
        inner = "str" if declared in TEXTS else ""
        if isinstance(node, yaml.SequenceNode) and node.tag == f"{_TAG}seq":
            return [self.value(item, "", inner, depth + 1) for item in node.value]
        if node.tag != f"{_TAG}map":
            self._refuse(node, f"the tag {node.tag} is not read here")
        found: dict[Any, Any] = {}
        merged: dict[Any, Any] = {}
        for name, child in node.value:
            if not isinstance(name, yaml.ScalarNode):
                self._refuse(name, "the name of a key must be a text or a number")
            if name.tag == "plain" and name.value == "<<":
                merged = self._merged(child, key, inherited, depth + 1) | merged
                continue
            given = self._scalar(name, inner or "key")
            if given in found:
                self._refuse(name, f"the key {name.value} stands here a second time")
            inside = f"{key}.{given}" if key else str(given)
            found[given] = self.value(child, inside, inner, depth + 1)
        return merged | found

    def _merged(self, node: Any, key: str, inherited: str, depth: int) -> dict[Any, Any]:
        """Return the keys that stand behind `<<`, of which the first of several counts."""
        parts = self.value(node, key, inherited, depth)
        merged: dict[Any, Any] = {}
        for part in parts if isinstance(parts, list) else [parts]:
            if not isinstance(part, dict):
                self._refuse(node, "<< takes keys")
            merged = part | merged
        return merged

    def _scalar(self, node: Any, declared: str) -> Any:
        """Return what a scalar says; `declared` is "key" for the name of a key."""
        text: str = node.value
        if re.search("[\ud800-\udfff]", text):
            self._refuse(node, "half of a surrogate pair is no text")
        if node.tag == f"{_TAG}str":
            return text
        kind = "" if node.tag == "plain" else node.tag.removeprefix(_TAG)
        if kind not in ("", "int", "float", "bool", "null"):
            self._refuse(node, f"the tag {node.tag} is not read here")
        if _NULL.fullmatch(text):
            return None
        if declared in TEXTS and not kind:
            return text
        words = _WORD if declared.startswith("bool") else _BOOL
        if found := _BOOL.fullmatch(text) or words.fullmatch(text):
            return found["false"] is None
        if _INT.fullmatch(text) and len(text) < 400:
            return float(text) if kind == "float" else int(text)
        if _FLOAT.fullmatch(text) and math.isfinite(number := float(text)):
            return number
        plain = text.startswith((".", "-.", "+.")) or declared.startswith("float")
        if plain and (found := _NO_NUMBER.fullmatch(text)):
            return float(f"{found['sign']}inf") if found["inf"] else math.nan
        if declared == "key" or not (kind or _DISPUTED.fullmatch(text)):
            return text
        self._refuse(
            node,
            f'{text[:40]}: programs read this in different ways; write "{text[:40]}" for the text, '
            "otherwise a number in plain decimal digits, true or false",
        )

    def _refuse(self, node: Any, reason: str) -> NoReturn:
        raise ConfigError(f"{self._where}: line {node.start_mark.line + 1}: {reason}")


def flat(node: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values of a mapping of mappings by dotted key."""
    found: dict[str, Any] = {}
    for key, value in node.items():
        if isinstance(value, Mapping) and value:
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found
