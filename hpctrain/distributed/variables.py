"""The variables of NCCL, gloo and torch, which each rank sets before it imports torch.

    network.*, train.expandable_segments, site.env ── export() ── os.environ ── import torch

Every way to start a rank ends in a process that has read the config and not yet imported torch.
There `export` is called, so it does not matter how the environment of the ranks came about.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping

from hpctrain.config.schema import Config
from hpctrain.errors import ConfigError

# torch reads one of these; what the user has exported by one name is not mixed with another.
_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")


def variables(config: Config) -> dict[str, tuple[str, str]]:
    """Return the variables that the config asks for.

    Returns:
        For each name the value, and the config key that it comes from.
    """
    network = config.network
    asked: dict[str, tuple[str | None, str]] = {
        # Without "=" NCCL takes every interface whose name begins like this.
        "NCCL_SOCKET_IFNAME": (network.interface and f"={network.interface}", "network.interface"),
        "GLOO_SOCKET_IFNAME": (network.interface, "network.interface"),
        "NCCL_P2P_LEVEL": (network.p2p_level, "network.p2p_level"),
        "NCCL_DEBUG": (network.debug, "network.debug"),
        "TORCH_DISTRIBUTED_DEBUG": (network.torch_debug, "network.torch_debug"),
    }
    if network.infiniband == "none":
        asked["NCCL_IB_DISABLE"] = "1", "network.infiniband"
    elif network.infiniband != "auto":
        asked["NCCL_IB_HCA"] = network.infiniband, "network.infiniband"
    if config.train.expandable_segments:
        asked[_ALLOCATOR[0]] = "expandable_segments:True", "train.expandable_segments"
    asked |= {name: (value, f"site.env.{name}") for name, value in config.site.env.items()}
    return {name: (value, key) for name, (value, key) in asked.items() if value is not None}


def export(config: Config, environment: MutableMapping[str, str] = os.environ) -> list[str]:
    """Set the variables of the config, except those that the user has exported.

    Args:
        config: The config of the run.
        environment: The environment of this process.

    Returns:
        A text for each variable that keeps another value than the config asks for.

    Raises:
        ConfigError: `site.env` has a name or value that no variable can have.
    """
    kept = []
    for name, (value, key) in variables(config).items():
        names = _ALLOCATOR if name in _ALLOCATOR else (name,)
        exported = next((other for other in names if other in environment), None)
        if exported is None:
            try:
                environment[name] = value
            except ValueError as error:
                raise ConfigError(f"{key}={value!r}: not a variable of the environment") from error
        elif environment[exported] != value:
            kept.append(f"{exported}={environment[exported]} (not {key}={value})")
    return kept
