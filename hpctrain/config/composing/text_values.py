"""Values of text keys that Hydra reads as something else: `name=1e3` is the text 1e3.

Hydra's grammar reads true, nan, 1e3 and 1_0 as values of their own, whatever the type of the key,
and its sweeper writes them in its own way (True, 1000.0). Here such a value is quoted, so a key
gets what was typed, with and without `-m`, as from a file (`hpctrain.base.files.yaml_file`).
"""

import re

from hpctrain.base.files import yaml_file
from hpctrain.config.frozen import types
from hpctrain.errors import ConfigError

_NUMBERS = ("int", "int | None", "float", "float | None", "list[int]", "list[int] | None")


def _is_text(key: str) -> bool:
    """Return whether a key holds any text, or texts."""
    declared = types().get(key) or types().get(key.rpartition(".")[0], "")
    return declared in yaml_file.TEXTS


def quoted(override: str) -> str:
    """Return `name='true'` for `name=true`; an override of another type as it is.

    A number that programs read differently, such as `010`, is a ConfigError.
    """
    name, equals, value = override.partition("=")
    key = name.lstrip("+")
    if re.search(r"""['"(){}$\\]""", value):
        return override
    if _is_text(key):
        return name + equals + re.sub(r"[^,[\]]+", _quoted, value)
    for part in re.split(r"[,[\]]", value) if types().get(key) in _NUMBERS else ():
        if yaml_file.is_disputed(part) and part[-1].isdigit():
            raise ConfigError(f"{override}: write the number {part} in plain decimal digits")
    return override


def _quoted(part: re.Match[str]) -> str:
    word = part[0].strip()
    return part[0] if yaml_file.is_text(word) else f"'{word}'"
