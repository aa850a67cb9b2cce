"""The keys of hydra-submitit-launcher, read as the keys of `launch` and `site`.

    hydra.launcher.timeout_min=60 ── read() ── launch.time_min=60

So commands and experiments that were written for that launcher keep working.
"""

from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any

from hpctrain.base.errors import ConfigError
from hpctrain.config.schema import SiteConfig

READ_AS = {
    "nodes": "launch.nodes",
    "tasks_per_node": "launch.tasks_per_node",
    "cpus_per_task": "launch.cpus_per_task",
    "gpus_per_node": "launch.gpus_per_node",
    "mem_gb": "launch.mem_gb",
    "timeout_min": "launch.time_min",
    "signal_delay_s": "launch.warn_s",
    "array_parallelism": "launch.max_running",
    "name": "name",
    "partition": "site.partition",
    "account": "site.account",
    "qos": "site.qos",
    "constraint": "site.constraint",
    "setup": "site.setup",
    "srun_args": "site.srun",
    "comment": "site.sbatch.comment",
    "exclude": "site.sbatch.exclude",
    "gres": "site.sbatch.gres",
}
# These have no effect, and need none.
NOT_NEEDED = {
    "max_num_timeout": "a run is requeued at its time limit as long as it makes progress",
    "submitit_folder": "the logs are in the run directories",
    "stderr_to_stdout": "the log of each rank has both streams",
}
INSTEAD = {
    "cpus_per_gpu": "launch.cpus_per_task",
    "gpus_per_task": "launch.gpus_per_node with site.gpu_option=gpus-per-task",
    "mem_per_cpu": "launch.mem_gb with site.memory_option=mem-per-cpu",
    "mem_per_gpu": "launch.mem_gb with site.memory_option=mem-per-gpu",
    "use_srun": "nothing: srun always starts the ranks",
}
_EXTRA = "additional_parameters"
_STOCK = "hydra_plugins.hydra_submitit_launcher.submitit_launcher"


def is_local(launcher: Mapping[str, Any]) -> bool:
    """Return whether the section `hydra.launcher` says that the runs run on this machine."""
    return bool(launcher.get("local")) or launcher.get("_target_") == f"{_STOCK}.LocalLauncher"


def is_stock(launcher: Mapping[str, Any]) -> bool:
    """Return whether the section names a class of hydra-submitit-launcher instead of ours."""
    return str(launcher.get("_target_")).startswith(f"{_STOCK}.")


def read(launcher: Mapping[str, Any]) -> Iterator[tuple[str, Any, str]]:
    """Yield for each given key ours ("" if it has no effect), its value, and a line for people.

    `launcher` is the section `hydra.launcher` with plain values, in which null means not given.
    """
    for name, value in launcher.items():
        line = f"hydra.launcher.{name}={value}"
        if value is None:
            continue
        if name in READ_AS:
            yield READ_AS[name], value, f"{line} is read as {READ_AS[name]}={value}"
        elif name in NOT_NEEDED:
            yield "", value, f"{line} is not needed: {NOT_NEEDED[name]}"
    extra = launcher.get(_EXTRA) or {}
    if not isinstance(extra, Mapping):
        raise ConfigError(
            f"hydra.launcher.{_EXTRA}={extra}: it must be options of sbatch with their values, "
            "such as '{nice: 10}'"
        )
    for option, value in extra.items():
        named = str(option).replace("-", "_")
        if option == "requeue" and value is True:
            line = f"hydra.launcher.{_EXTRA}.requeue=true"
            yield "", value, f"{line} is not needed: every job of hpctrain is submitted with it"
            continue
        is_key = named in {member.name for member in fields(SiteConfig)}
        key = f"site.{named}" if is_key else f"site.sbatch.{option}"
        yield key, value, f"hydra.launcher.{_EXTRA}.{option}={value} is read as {key}={value}"


def is_read(name: str) -> bool:
    """Return whether a key of submitit is read, or is not needed."""
    return name in (*READ_AS, _EXTRA, *NOT_NEEDED)


def unknown(name: str, given: str = "") -> str:
    """Return the error text for a key of submitit that is not read, or was `given` otherwise."""
    given = given or f"hydra.launcher.{name}"
    if name in INSTEAD:
        return f"{given}: use {INSTEAD[name]}"
    listed = ", ".join([*READ_AS, _EXTRA, *NOT_NEEDED])
    return f"unknown key {given}: of submitit's keys these are read: {listed}"
