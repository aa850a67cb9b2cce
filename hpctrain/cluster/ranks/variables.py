"""The variables of NCCL, gloo and torch, which each rank sets before it imports torch.

    network.*, train.deterministic, site.env ── export() ── os.environ ── import torch

Every way to start a rank ends in a process that has read the config and not yet imported torch.
There `export` is called, so it does not matter how the environment of the ranks came about.
"""

import os
from collections.abc import Mapping, MutableMapping

from hpctrain.base.errors import ConfigError
from hpctrain.config.rules.job import ALLOCATOR, GLOO, variables
from hpctrain.config.schema import NetworkConfig, TrainConfig

# The number of collective operations that torch's flight recorder keeps, which
# `hpctrain.engine.faults.collectives` reads. The second name is the older one.
_RECORDER = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")


def export(
    network: NetworkConfig,
    train: TrainConfig,
    site_env: Mapping[str, str],
    environment: MutableMapping[str, str] = os.environ,
    *,
    one_node: bool = False,
) -> list[str]:
    """Set the variables of the config, except those that the user has exported.

    With `one_node` there are several ranks and all of them are on this node. Returns a text for
    each variable that keeps another value than the config asks for.
    """
    asked = variables(network, train)
    asked |= {name: (value, f"site.env.{name}") for name, value in site_env.items()}
    given = environment.keys() | asked.keys()
    if not {*_RECORDER} & given:
        environment[_RECORDER[0]] = "2000"
    if one_node and GLOO not in given:
        environment[GLOO] = "lo"  # gloo has no authentication: other nodes need not reach it
    kept = (_set(environment, name, value, key) for name, (value, key) in asked.items())
    return [*filter(None, kept)]


def _set(environment: MutableMapping[str, str], name: str, value: str, key: str) -> str:
    """Set a variable, unless the user has exported it; return the text for another value."""
    names = ALLOCATOR if name in ALLOCATOR else (name,)
    exported = next((other for other in names if other in environment), None)
    if exported is None:
        try:
            environment[name] = value
        except ValueError as error:
            raise ConfigError(f"{key}={value!r}: not a variable of the environment") from error
    elif environment[exported] != value:
        return f"{exported}={environment[exported]} (not {key}={value})"
    return ""
