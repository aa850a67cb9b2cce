"""The keys of `network`."""

from __future__ import annotations

import re
from dataclasses import dataclass

from hpctrain.config.schema.key import key


def _check_interfaces(names: str | None) -> str:
    fits = names is None or re.fullmatch(r"[\w.:@-]+(,[\w.:@-]+)*", names, re.ASCII)
    return "" if fits else "a name such as ib0, or several with commas between them"


def _check_infiniband(devices: str) -> str:
    fits = re.fullmatch(r"\^?=?[\w.:-]+(,[\w.:-]+)*", devices, re.ASCII)
    return "" if fits else "auto, none, or devices such as mlx5_0,mlx5_1 or ^mlx5_3"


@dataclass
class NetworkConfig:
    """How the ranks communicate. A variable that you have exported has precedence over its key."""

    interface: str | None = key(
        None,
        "NCCL and gloo connect through this network interface, such as ib0 (NCCL_SOCKET_IFNAME, "
        "GLOO_SOCKET_IFNAME). Null leaves the choice to them. Before, the ranks meet at "
        "MASTER_ADDR, by default the name of the first host.",
        check=_check_interfaces,
    )
    infiniband: str = key(
        "auto",
        "NCCL uses the InfiniBand devices that it finds (auto), no InfiniBand (none: "
        "NCCL_IB_DISABLE=1), exactly these devices, such as mlx5_0,mlx5_1, or all but these, such "
        "as ^mlx5_3 (NCCL_IB_HCA).",
        check=_check_infiniband,
    )
    debug: str | None = key(
        None,
        "NCCL prints this much about its work (NCCL_DEBUG). Null prints nothing.",
        choices=(None, "VERSION", "WARN", "INFO", "TRACE"),
    )
