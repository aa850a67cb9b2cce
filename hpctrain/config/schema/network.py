"""The keys of `network`."""

from __future__ import annotations

from dataclasses import dataclass

from hpctrain.config.schema.key import key


@dataclass
class NetworkConfig:
    """How the ranks communicate. A variable that you have exported has precedence over its key."""

    interface: str | None = key(
        None,
        "NCCL and gloo connect through this network interface, such as ib0 (NCCL_SOCKET_IFNAME, "
        "GLOO_SOCKET_IFNAME). Null leaves the choice to them. Before, the ranks meet at "
        "MASTER_ADDR, by default the name of the first host.",
        pattern=(
            r"[\w.:@-]+(,[\w.:@-]+)*",
            "a name such as ib0, or several with commas between them",
        ),
    )
    infiniband: str = key(
        "auto",
        "NCCL uses the InfiniBand devices that it finds (auto), no InfiniBand (none: "
        "NCCL_IB_DISABLE=1), exactly these devices, such as mlx5_0,mlx5_1, or all but these, such "
        "as ^mlx5_3 (NCCL_IB_HCA).",
        pattern=(
            r"\^?=?[\w.:-]+(,[\w.:-]+)*",
            "auto, none, or devices such as mlx5_0,mlx5_1 or ^mlx5_3",
        ),
    )
    debug: str | None = key(
        None,
        "NCCL prints this much about its work (NCCL_DEBUG). Null prints nothing.",
        choices=(None, "VERSION", "WARN", "INFO", "TRACE"),
    )
