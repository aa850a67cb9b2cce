"""What somebody has chosen of a config, and what of it decides the result: the identity of a run.

    config ── keys that decide the result, where they differ from the defaults ──┐
    data set ── its digest ──────────────────────────────────────────────────────┼─ hash ─ signature
    IDENTITY_VERSION ────────────────────────────────────────────────────────────┘

Only differences from the schema's defaults are hashed, so that a release that adds a key does not
rename the runs that exist. Each key of the schema says whether it decides the result
(`identity=False`: it does not). `data.path` is replaced by the digest of the data set: a copy
elsewhere is the same data. A config has hundreds of keys, so MLflow's table of a run shows only the
`chosen` ones; `config.yaml`, an artifact of the run, has all of them.
"""

import hashlib
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hpctrain.base import secrets
from hpctrain.config.schema import Config, all_members
from hpctrain.config.schema.key import changed, keys

# Raise it when a config of before would now mean another run: a default has changed, or a key that
# decides the result has another name. Then every run has a new name.
IDENTITY_VERSION = 1
_ELSEWHERE = ("tracking.uri",)  # it says where a run is, not what it is


def run_path(config: Config, data_digest: str) -> Path:
    """Return where the directory of a run is: `NAME-SIGNATURE` in `output_dir`."""
    return Path(config.output_dir) / f"{config.name}-{signature(config, data_digest)}"


def signature(config: Config, data_digest: str) -> str:
    """Return eight hexadecimal digits, the hash of the identity."""
    text = json.dumps(identity(config, data_digest), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def identity(config: Config, data_digest: str) -> dict[str, Any]:
    """Return what decides the result: the dotted keys that differ from their defaults."""
    variables = secrets.known()  # a renewed token does not make another run
    content = {
        key.name: secrets.referenced(value, variables)
        for key, given in changed(config)
        if key.identity and (value := _relevant(key.name, given)) != key.default
    }
    return {"identity_version": IDENTITY_VERSION, "data_digest": data_digest, **content}


def changeable() -> list[str]:
    """Return the keys and sections that are not part of the identity."""
    return [member.name for member in all_members() if not member.rule.identity]


def _relevant(key: str, value: Any) -> Any:
    """The part of a value that the digest of the data does not replace."""
    if key in ("data.mixture", "data.val_sets"):
        return [{name: part[name] for name in part if name != "path"} for part in value]
    if key == "data.subset" and (value or "").endswith(".npy"):
        return None
    return value


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
