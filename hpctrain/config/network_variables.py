"""The variables of NCCL, gloo and torch that config keys stand for."""

from hpctrain.config.schema import NetworkConfig, TrainConfig

# torch reads one of these, so they are never set side by side.
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
GLOO = "GLOO_SOCKET_IFNAME"

# With any other value torch refuses matrix products in deterministic algorithms.
CUBLAS_WORKSPACES = (":4096:8", ":16:8")


def variables(network: NetworkConfig, train: TrainConfig) -> dict[str, tuple[str, str]]:
    """Return the value of each variable that the sections ask for, and the key it comes from."""
    asked: dict[str, tuple[str | None, str]] = {
        # Without "=" NCCL takes every interface whose name begins like this.
        "NCCL_SOCKET_IFNAME": (network.interface and f"={network.interface}", "network.interface"),
        GLOO: (network.interface, "network.interface"),
        "NCCL_DEBUG": (network.debug, "network.debug"),
    }
    if network.infiniband == "none":
        asked["NCCL_IB_DISABLE"] = "1", "network.infiniband"
    elif network.infiniband != "auto":
        asked["NCCL_IB_HCA"] = _exactly(network.infiniband), "network.infiniband"
    if train.deterministic:
        # Without it cuBLAS adds in an order that depends on what else runs. The switches of NVLink
        # add in an order of their own; Megatron-LM leaves them out for the same reason.
        asked["CUBLAS_WORKSPACE_CONFIG"] = CUBLAS_WORKSPACES[0], "train.deterministic"
        asked["NCCL_NVLS_ENABLE"] = "0", "train.deterministic"
        asked["TORCHINDUCTOR_DETERMINISTIC"] = "1", "train.deterministic"
    return {name: (value, key) for name, (value, key) in asked.items() if value is not None}


def _exactly(devices: str) -> str:
    """Return a list of devices for NCCL, to which `mlx5_1` would also mean `mlx5_10`."""
    sign = "^=" if devices.startswith("^") else "="
    return sign + devices.lstrip("^=")
