"""Values of text keys that Hydra reads as something else: `name=nan` is the text nan.

Hydra's grammar reads true, nan, 1e3 and 1_0 as values of their own, whatever the type of the key,
and its sweeper writes them in its own way (True, 1000.0). Here such a value becomes a quoted text,
which is the same with and without `-m`: true, nan, 1000.0, 10.
"""

from __future__ import annotations

import functools

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from hpctrain.config.schema import Config
from hpctrain.config.schema.key import keys


@functools.cache
def text_keys() -> frozenset[str]:
    """Return the keys that hold any text."""
    texts = (key for key in keys(Config) if key.type in ("str", "str | None"))
    return frozenset(key.name for key in texts if not key.rule.choices)


def quoted(override: str) -> str:
    """Return `name='true'` for `name=true`; an override of another key or type as it is."""
    if override.partition("=")[0] not in text_keys():
        return override
    try:
        parsed = OverridesParser.create().parse_override(override)
    except HydraException:  # Hydra will report it
        return override
    if parsed.is_sweep_override() or not isinstance(parsed.value(), bool | int | float):
        return override
    text = parsed.get_value_element_as_str()
    text = text.lower() if isinstance(parsed.value(), bool) else text
    return f"{parsed.get_key_element()}='{text}'"
