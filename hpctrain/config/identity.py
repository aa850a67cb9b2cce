"""What makes two configs the same run: the part of a config that decides the result."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from hpctrain import secrets
from hpctrain.config.frozen import plain
from hpctrain.config.schema import Config

# What decides neither the samples nor the mathematics is not part of a run's identity.
# `data.path` is replaced by the data set's digest: a copy elsewhere is the same data.
NOT_IN_SIGNATURE = (
    "name", "output_dir", "metric", "parallel", "checkpoint", "tracking", "launch", "site",
    "data.path", "data.threads", "data.prefetch_mb", "data.workers", "data.stage",
    "data.stage_dir", "data.stage_gb", "data.io", "data.verify", "train.log_every",
)  # fmt: skip


def signature(config: Config, data_digest: str) -> str:
    """Eight hexadecimal digits of what decides the result."""
    text = json.dumps(identity(config, data_digest), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def identity(config: Config, data_digest: str) -> dict[str, Any]:
    """The part of a config that decides the result; its hash names the run."""
    content = plain(config)
    for key in NOT_IN_SIGNATURE:
        *sections, last = key.split(".")
        node = content
        for section in sections:
            node = node[section]
        del node[last]
    content["data"]["mixture"] = [
        {key: value for key, value in part.items() if key != "path"}
        for part in content["data"]["mixture"]
    ]
    if (content["data"]["subset"] or "").endswith(".npy"):
        del content["data"]["subset"]  # what is in it is part of the digest
    return {**_without_secrets(content, secrets.known()), "data_digest": data_digest}


def _without_secrets(node: Any, values: Mapping[str, str]) -> Any:
    """A token that is renewed does not make it another run."""
    if isinstance(node, dict):
        return {key: _without_secrets(value, values) for key, value in node.items()}
    if isinstance(node, list):
        return [_without_secrets(value, values) for value in node]
    return secrets.reference(node, values=values) if isinstance(node, str) else node
