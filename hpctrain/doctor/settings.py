"""The config of the checks: the cluster, the folders and, if one is named, the data set."""

from __future__ import annotations

import re
from collections.abc import Sequence

from omegaconf import OmegaConf

from hpctrain.config.composing.compose_call import composed
from hpctrain.config.frozen import from_omegaconf
from hpctrain.config.schema import Config
from hpctrain.config.validate import validate_job
from hpctrain.errors import ConfigError

_SECTIONS = ("launch", "site", "network", "parallel", "tracking", "name", "output_dir")


def settings(overrides: Sequence[str], config_dir: str | None = None) -> tuple[Config, bool]:
    """Compose the overrides of one run, of which model and task may be missing.

    Returns:
        The config, whose `data.path` is "" if no data set is named, and whether jobs shall run on
        this machine (`hydra/launcher=submitit_local`).
    """
    for text in overrides:
        if not re.match(r"[+~]{0,2}[\w./@]+(=|$)", text):
            raise ConfigError(f"{text}: neither an option nor an override such as launch.nodes=2")
    with composed(overrides, config_dir) as call:
        if len(call.runs) != 1:
            raise ConfigError(f"{' '.join(overrides)}: {len(call.runs)} runs; give single values")
        node = call.composer(call.runs[0])
        has_data = not OmegaConf.is_missing(node.data, "path")
        sections = [*_SECTIONS, *(["data"] if has_data else [])]
        chosen = OmegaConf.masked_copy(node, sections)
        if not has_data:
            chosen["data"] = {"path": "."}
        config, here = from_omegaconf(chosen), call.local
    if not has_data:
        config.data.path = ""
    validate_job(config, sections)
    return config, here
