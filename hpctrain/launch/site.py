"""`launch` and `site` as options of sbatch, in the words that this cluster wants to hear."""

from __future__ import annotations

import math
import os
import re
import unicodedata
from pathlib import Path

from hpctrain.config.schema import Config
from hpctrain.errors import ConfigError

Options = dict[str, str | int | bool]
"""Option to value; True is a flag without one."""

_LONGEST = 1024  # bytes of a parameter; slurmctld refuses more
_LONGEST_PATH = 4000  # bytes of a sweep's folder: PATH_MAX less the names of the logs in it


def sbatch_options(config: Config) -> Options:
    """Every option of sbatch, but those of the array and its logs.

    Raises:
        ConfigError: `site.sbatch` names an option that has a key of its own, or a value is
            nothing that Slurm could read from a line.
    """
    launch, site = config.launch, config.site
    options: Options = {
        "job-name": config.name,
        "nodes": launch.nodes,
        "ntasks-per-node": launch.tasks_per_node,
        "cpus-per-task": launch.cpus_per_task,
        **gpu_options(config),
        **_memory_options(config),
        "time": launch.time_min,
        "signal": f"USR2@{launch.warn_s}",
        "requeue": True,
    }
    for key in _NAMED:
        if (value := getattr(site, key)) is not None:
            options[key.replace("_", "-")] = check_text(f"site.{key}", value)
    for name, value in site.sbatch.items():
        option, key = name.replace("_", "-"), f"site.sbatch.{name}"
        if not re.fullmatch(r"[a-z][a-z0-9-]+", option):
            raise ConfigError(f"{key}={value}: the long name of an option, without the dashes")
        if option in _OWN_KEYS:
            raise ConfigError(f"{key}={value}: say it with {_OWN_KEYS[option]}")
        if option in (*options, "no-requeue", "open-mode", "dependency"):
            raise ConfigError(f"{key}={value}: the script says --{option} itself")
        if value is None or value is False:
            continue
        if not isinstance(value, str | int | float):
            raise ConfigError(f"{key}={value}: text, a number, or true for an option without value")
        options[option] = True if value is True else check_text(key, str(value))
    return options


def gpu_options(config: Config) -> dict[str, str]:
    """How this cluster is asked for GPUs; for srun as well, since not every Slurm passes it on.

    With `gpus-per-task` each rank sees its own GPUs, else all of the node's.
    """
    count, option = config.launch.gpus_per_node, config.site.gpu_option
    if count == 0 or option == "none":
        return {}
    if option == "gpus-per-task":
        count //= config.launch.tasks_per_node  # validate() has seen that it divides evenly
    kind = config.site.gpu_type and check_text("site.gpu_type", config.site.gpu_type)
    words = ["gpu" if option == "gres" else None, kind, str(count)]
    return {option: ":".join(filter(None, words))}


def _memory_options(config: Config) -> dict[str, str]:
    launch, option = config.launch, config.site.memory_option
    if launch.mem_gb is None or option == "none":
        return {}
    shares = {
        "mem": 1,
        "mem-per-cpu": launch.tasks_per_node * launch.cpus_per_task,
        "mem-per-gpu": launch.gpus_per_node,
    }[option]
    if shares == 0:
        raise ConfigError(
            f"site.memory_option={option} with launch.gpus_per_node=0: launch.mem_gb="
            f"{launch.mem_gb} cannot be divided over no GPU; launch.mem_gb=null, or another option"
        )
    return {option: f"{math.ceil(launch.mem_gb * 1024 / shares)}M"}


def check_text(key: str, value: str, longest: int = _LONGEST) -> str:
    """The value, if an #SBATCH line can hold it.

    Raises:
        ConfigError: a newline or another control character, no valid Unicode, or too long.
    """
    if bad := [char for char in value if unicodedata.category(char) in ("Cc", "Cs")]:
        raise ConfigError(
            f"{key}={value!r}: {bad[0]!r} cannot stand in a line of a batch script; no newlines "
            "or control characters"
        )
    if (size := len(os.fsencode(value))) > longest:
        raise ConfigError(f"{key}={value[:60]!r}…: {size} bytes, but Slurm takes {longest}")
    return value


def check_folder(config: Config, folder: Path) -> None:
    r"""Refuse the folder of an array that Slurm cannot keep logs in.

    A backslash turns all patterns of a log's path off, and srun 22.05 misreads `%%`, the escaped
    `%` (as in `%%A %%t`): a path with one of them cannot be written reliably.

    Raises:
        ConfigError: it lies in such a path, or is too long.
    """
    check_text("output_dir", str(folder), _LONGEST_PATH)
    if bad := [char for char in "%\\" if char in str(folder)]:
        raise ConfigError(
            f"output_dir={config.output_dir!r}: Slurm reads {bad[0]!r} in the path of a log as a "
            "pattern; choose another"
        )


_NAMED = (
    *("partition", "account", "qos", "constraint", "reservation", "licenses"),
    *("mail_user", "mail_type"),
)
_OWN_KEYS = {
    "nodes": "launch.nodes",
    "ntasks": "launch.nodes and launch.tasks_per_node",
    "ntasks-per-node": "launch.tasks_per_node",
    "cpus-per-task": "launch.cpus_per_task",
    "cpus-per-gpu": "launch.cpus_per_task",
    "gpus": "launch.gpus_per_node",
    "gpus-per-node": "launch.gpus_per_node",
    "gpus-per-task": "launch.gpus_per_node and site.gpu_option=gpus-per-task",
    "mem": "launch.mem_gb",
    "mem-per-cpu": "launch.mem_gb and site.memory_option=mem-per-cpu",
    "mem-per-gpu": "launch.mem_gb and site.memory_option=mem-per-gpu",
    "time": "launch.time_min",
    "signal": "launch.warn_s",
    "array": "launch.max_running",
    "job-name": "name",
    "output": "output_dir, the logs are in the run directory",
    "error": "output_dir, the logs are in the run directory",
    **{key.replace("_", "-"): f"site.{key}" for key in _NAMED},
}
