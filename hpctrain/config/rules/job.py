"""What must hold in the keys of a job: resources, variables, monitor, store, secrets."""

import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

from hpctrain.base import secrets
from hpctrain.config.rules.combinations import refused
from hpctrain.config.schema import Config, NetworkConfig, TrainConfig

_NAMES = ("name", "output_dir", "tracking.experiment")
_PATHS = (
    *("output_dir", "data.path", "data.mixture.path", "data.val_sets.path", "data.stage_dir"),
    *("checkpoint.init_from", "tracking.uri", "site.container.image", "site.container.binds"),
)
_IDLE_SAMPLES = 3
# torch reads one of these, so they are never set side by side.
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
GLOO = "GLOO_SOCKET_IFNAME"

# With any other value torch refuses matrix products in deterministic algorithms.
CUBLAS_WORKSPACES = (":4096:8", ":16:8")
# Without the first cuBLAS adds in an order that depends on what else runs. The switches of NVLink
# add in an order of their own; Megatron-LM leaves them out for the same reason.
_DETERMINISTIC = {
    "CUBLAS_WORKSPACE_CONFIG": CUBLAS_WORKSPACES[0],
    "NCCL_NVLS_ENABLE": "0",
    "TORCHINDUCTOR_DETERMINISTIC": "1",
}


def resources(config: Config) -> Iterator[str]:
    """Yield what is wrong between the keys that say what a job gets."""
    launch, site, monitor = config.launch, config.site, config.monitor
    yield from refused(config, "job")
    if launch.gpus_per_node % launch.tasks_per_node:
        yield (
            f"launch.gpus_per_node={launch.gpus_per_node} cannot be divided evenly over "
            f"launch.tasks_per_node={launch.tasks_per_node}"
        )
    if launch.pack * (share := launch.gpus_per_run or 0) > 1.0001:
        yield (
            f"launch.gpus_per_run={share:g} with launch.pack={launch.pack}: all runs of a job "
            "share one GPU"
        )
    for name, (_, key) in variables(config.network, config.train).items():
        if name in site.env:
            yield f"{key} and site.env.{name} set the same variable: give one of them"
    undone = [line for line in site.setup if re.match(r"\s*(module|ml)\s.*\b(purge|reset)\b", line)]
    if site.modules and undone:
        yield (
            f"site.setup={undone}: it would undo site.modules={site.modules}, which come before; "
            f"put it at their beginning, such as site.modules=[purge, {site.modules[0]}]"
        )
    if launch.warn_s >= 60 * launch.time_min:
        yield (
            f"launch.warn_s={launch.warn_s} seconds is not below "
            f"launch.time_min={launch.time_min} minutes"
        )
    if monitor.enabled and 60.001 * monitor.idle_minutes < _IDLE_SAMPLES * monitor.every_s:
        yield (
            f"monitor.idle_minutes={monitor.idle_minutes} with monitor.every_s={monitor.every_s}: "
            f"a shorter time than {_IDLE_SAMPLES} samples says nothing; at least "
            f"{_IDLE_SAMPLES * monitor.every_s / 60:g} minutes"
        )


def variables(network: NetworkConfig, train: TrainConfig) -> dict[str, tuple[str, str]]:
    """Return the value of each variable that the sections ask for, and the key it comes from."""
    asked: dict[str, tuple[str, str]] = {}
    if network.interface is not None:
        # Without "=" NCCL takes every interface whose name begins like this.
        asked["NCCL_SOCKET_IFNAME"] = f"={network.interface}", "network.interface"
        asked[GLOO] = network.interface, "network.interface"
    if network.debug is not None:
        asked["NCCL_DEBUG"] = network.debug, "network.debug"
    if network.infiniband == "none":
        asked["NCCL_IB_DISABLE"] = "1", "network.infiniband"
    elif network.infiniband != "auto":
        # To NCCL `mlx5_1` would also mean `mlx5_10`.
        sign = "^=" if network.infiniband.startswith("^") else "="
        asked["NCCL_IB_HCA"] = sign + network.infiniband.lstrip("^="), "network.infiniband"
    if train.deterministic:
        asked |= {name: (value, "train.deterministic") for name, value in _DETERMINISTIC.items()}
    return asked


def text_problems(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield the texts that only a shell would understand, and secrets that files would show.

    `config` has the plain values of all sections. Secrets of the environment are replaced in files.
    """
    known = secrets.known()
    for key, text in _texts(config):
        if "$" in text or "~" in text:
            yield from _for_a_shell(key, text)
        if key.startswith("site.env."):
            yield from _in_script(key, text, known)
        else:
            for variable in (known[value] for value in known if value in text):
                yield from _shown(key, text, variable)
        if "://" in text and secrets.written_down(secrets.reference(text, values=known)):
            yield (
                f"{key}={secrets.mask(text)} holds a password or token, which would be written to "
                "files: export it as NAME_PASSWORD and say ${oc.env:NAME_PASSWORD} in its place"
            )


def _for_a_shell(key: str, text: str) -> Iterator[str]:
    """Yield why a path or a variable would not mean what it says: no shell reads it."""
    if not key.startswith("site.env.") and re.sub(r"\[\d+\]", "", key) not in _PATHS:
        return
    if match := re.search(r"\$\{?([A-Za-z_]\w*)\}?|(?:^|/)~(?=/|$)", text):
        name, shown = match[1] or "HOME", match[0].strip("/")
        job = f"; in site.setup, `export {key[9:]}=…`, for one of the job" * ("env." in key)
        yield (
            f"{key}={text}: no shell reads it, so {shown} would stay there; write "
            f"${{oc.env:{name}}}{job}"
        )


def _in_script(key: str, text: str, known: Mapping[str, str]) -> Iterator[str]:
    """Yield that the script would have a secret variable, which the environment has not."""
    name = key.removeprefix("site.env.")
    if secrets.is_secret(name) and secrets.is_telling(text) and text not in known:
        yield (
            f"{key} would be written into the job's script: export {name} in your shell "
            "instead, jobs inherit it"
        )


def _shown(key: str, text: str, variable: str) -> Iterator[str]:
    """Yield what is wrong with the value of a variable where everybody can read it."""
    if key.startswith("site."):
        yield (
            f"{key} holds the value of {variable}, which would be written into the job's script: "
            f"in site.setup say ${variable}, jobs inherit it"
        )
    elif key in _NAMES and not (key == "output_dir" and os.path.exists(text)):
        yield (
            f"{key} holds the value of {variable}, which would stand in the name of a folder, a "
            "job or an experiment, for everybody to read: give another one"
        )


def _texts(node: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Yield every text of a config with its dotted key."""
    if isinstance(node, str):
        yield key, node
    elif isinstance(node, dict):
        for name, value in node.items():
            yield from _texts(value, f"{key}.{name}" if key else str(name))
    elif isinstance(node, list):
        for i, value in enumerate(node):
            yield from _texts(value, f"{key}[{i}]")
