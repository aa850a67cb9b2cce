"""The values of a config that somebody has chosen: what MLflow's table of a run shows as params.

A config has hundreds of keys. Those that keep their defaults are in `config.yaml`, which is an
artifact of the run.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from hpctrain.config.schema import Config
from hpctrain.config.schema.key import keys

# They say where a run is, not what it is; the page has them elsewhere.
_ELSEWHERE = ("tracking.uri",)


def chosen(config: Config, overrides: Iterable[str] = ()) -> dict[str, Any]:
    """Return the values that differ from their defaults, and those that the overrides name.

    A swept value that happens to be the default is shown, too.
    """
    named = {override_key(text) for text in overrides}
    found = {}
    for key in keys(type(config)):
        value = key.value(config)
        if key.name not in _ELSEWHERE and (value != key.default or key.name in named):
            found[key.name] = value
    return found


def override_key(text: str) -> str:
    """Return the key of an override: `optimizer.lr` of `++optimizer.lr=1e-3`."""
    return re.sub(r"^[+~]*", "", text.partition("=")[0])
