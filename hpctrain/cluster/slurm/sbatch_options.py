"""The config sections `launch` and `site` as options of sbatch, in the form this cluster needs.

    launch.nodes=3-9 ── 4 and 8 fit ── sbatch --nodes=4-8 ── the job gets 6 ── srun --nodes=4

The scheduler knows no gaps in a range. So the ranks start on the largest number of nodes that fits,
and the other nodes of the job stay idle.

    launch.nodes=4 launch.spares=1 ── sbatch --nodes=5 --no-kill ── srun --nodes=4

A spare takes the place of a node that is lost: with --no-kill Slurm only takes that one away.
"""

import math
import os
import re
import unicodedata
from collections.abc import Iterator, Sequence
from pathlib import Path

from hpctrain.base.errors import ConfigError
from hpctrain.cluster.ranks.hostlist import listed
from hpctrain.cluster.slurm import release
from hpctrain.cluster.slurm.node_kinds import parts_option
from hpctrain.config.schema import LaunchConfig, SiteConfig

Options = dict[str, str | int | bool]
"""The value of each option; True means an option without a value."""

_LONGEST = 1024  # bytes of a value; slurmctld refuses longer ones
_LONGEST_PATH = 4000  # bytes of a sweep's folder: PATH_MAX less the names of the logs in it


def sbatch_options(
    name: str, launch: LaunchConfig, site: SiteConfig, fitting: Sequence[int], lead_s: int
) -> Options:
    """Return all options of sbatch except those for the array and its logs.

    `fitting` are the numbers of nodes that the job can use. It is told to save `lead_s` seconds
    before its time limit.

    An option in `site.sbatch` that has a config key of its own, or a value that cannot be written
    in one line, is a ConfigError.
    """
    options: Options = {
        "job-name": name,
        **_node_options(launch, site, fitting),
        "cpus-per-task": launch.cpus_per_task,
        **_gpu_options(launch, site),
        **_memory_options(launch, site),
        "time": launch.time_min,
        "signal": f"USR2@{lead_s}",
        "requeue": True,
    }
    for key in _NAMED:
        if (value := getattr(site, key)) is not None:
            options[key.replace("_", "-")] = _check_text(f"site.{key}", value)
    if "distribution" not in site.sbatch:  # Slurm's own changes the socket from rank to rank
        options["distribution"] = "block:block"
    for given, value in site.sbatch.items():
        option, key = given.replace("_", "-"), f"site.sbatch.{given}"
        if not re.fullmatch(r"[a-z][a-z0-9-]+", option):
            raise ConfigError(f"{key}={value}: give the long name of an option, without the dashes")
        if option in _OWN_KEYS:
            raise ConfigError(f"{key}={value}: use {_OWN_KEYS[option]} for this option")
        if value is None:
            continue
        release.check_option(key, option, value)
        if option == "requeue":
            options[option] = value
            continue
        if option in ("gpu-bind", "tres-bind", "tres-per-task") and value != "none":
            raise ConfigError(f"{key}={value}: {_OWN_GPU_ONLY}")
        if option == "gres" and option in options:  # such as nvme:950 beside the GPUs
            if "gpu" in re.split("[:,]", str(value)):
                raise ConfigError(f"{key}={value}: use launch.gpus_per_node for the GPUs")
            value = f"{options.pop(option)},{value}"
        if option in (*options, "no-requeue", "open-mode", "dependency"):
            raise ConfigError(f"{key}={value}: the script sets --{option} itself")
        if value is False:
            continue
        if not isinstance(value, str | int | float):
            raise ConfigError(f"{key}={value}: text, a number, or true for an option without value")
        options[option] = True if value is True else _check_text(key, str(value))
    for word in site.srun:
        if re.match(r"--(gpu-bind=(?!none$)|tres-bind|tres-per-task|gpus-per-task)", word):
            raise ConfigError(f"site.srun: {word}: {_OWN_GPU_ONLY}")
        if word == "--async":
            raise ConfigError(
                "site.srun: --async: srun would return at once, and the script would take the run "
                "for ended; leave it out"
            )
    return options


_OWN_GPU_ONLY = (
    "each rank would see its own GPU only, and NCCL could use neither NVLink nor shared memory "
    "between the ranks of a node; leave it out"
)


def _node_options(
    launch: LaunchConfig, site: SiteConfig, fitting: Sequence[int]
) -> dict[str, str | int | bool]:
    """Return the options of sbatch for the number of nodes, if these are fitting, and of ranks.

    A `site.gpu_option` that does not work with a range is a ConfigError.
    """
    if len(launch.node_numbers) == 1:
        nodes = launch.node_numbers[0] + launch.spares
        lost = {"no-kill": True} if launch.spares else {}
        return {"nodes": nodes, "ntasks-per-node": launch.tasks_per_node, **lost}
    if launch.gpus_per_node and site.gpu_option == "gpus-per-task":
        raise ConfigError(
            f"site.gpu_option=gpus-per-task with launch.nodes={launch.nodes}: sbatch multiplies it "
            "by the number of tasks, which a range leaves open; use gpus-per-node or gres"
        )
    # With --ntasks-per-node=T, Slurm makes a job of T tasks for each node of the smallest number,
    # and gives N tasks at most N nodes. So the job has no tasks, and asks for the CPUs of a node.
    cpus = launch.tasks_per_node * launch.cpus_per_task
    return {"nodes": f"{fitting[0]}-{fitting[-1]}", "mincpus": cpus}


def rank_options(launch: LaunchConfig) -> list[str]:
    """Return the options of srun that start the ranks, as words of the script."""
    tasks = launch.tasks_per_node
    if len(launch.node_numbers) == 1 and not launch.spares and launch.pack == 1:
        return []
    return ['--nodes="$nodes"', f'--ntasks="$((nodes * {tasks}))"', f"--ntasks-per-node={tasks}"]


def choose_nodes(launch: LaunchConfig, fitting: Sequence[int]) -> Iterator[str]:
    """Yield the lines of the script that set `$nodes`, the number of nodes with ranks."""
    if len(launch.node_numbers) == 1:
        yield f"nodes={launch.node_numbers[0]}"
        return
    yield "\n# The ranks run on the largest number of nodes that fits the batch and the degrees."
    yield f"for nodes in {' '.join(map(str, reversed(fitting)))}; do"
    yield "    ((nodes <= SLURM_JOB_NUM_NODES)) && break"
    yield "done"
    if len(fitting) <= fitting[-1] - fitting[0]:  # there are gaps
        yield "if ((nodes < SLURM_JOB_NUM_NODES)); then"
        yield '    echo "warning: of $SLURM_JOB_NUM_NODES nodes only $nodes are used:" \\'
        yield f'        "launch.nodes={launch.nodes}, and {listed(fitting)} fit" >&2'
        yield "fi"


def _gpu_options(launch: LaunchConfig, site: SiteConfig) -> dict[str, str]:
    """Return the option of sbatch that requests GPUs on this cluster."""
    if launch.gpus_per_run is not None:
        return parts_option(launch, site, launch.pack)
    count, option = launch.gpus_per_node, site.gpu_option
    if count == 0 or option in ("srun", "none"):
        return {}
    if option == "gpus-per-task":
        count //= launch.tasks_per_node  # validate() has checked that it divides evenly
    return {option: _gpus(site, option, count)}


def step_gpu_options(launch: LaunchConfig, site: SiteConfig) -> dict[str, str]:
    """Return the option of srun that lets the ranks have the GPUs of the job.

    Every rank sees all GPUs of its node. With `--gpus-per-task` or `--gpu-bind`, the control group
    of a rank has its own GPU only, and NCCL can then use neither NVLink nor shared memory between
    the ranks of a node.
    """
    if launch.gpus_per_run is not None:
        return parts_option(launch, site, 1)
    count, option = launch.gpus_per_node, site.gpu_option
    if count == 0 or option == "none":
        return {}
    option = {"gpus-per-task": "gpus-per-node", "srun": "gres"}.get(option, option)
    return {option: _gpus(site, option, count)}


def _gpus(site: SiteConfig, option: str, count: int) -> str:
    kind = site.gpu_type and _check_text("site.gpu_type", site.gpu_type)
    return ":".join(filter(None, ["gpu" if option == "gres" else None, kind, str(count)]))


def _memory_options(launch: LaunchConfig, site: SiteConfig) -> dict[str, str]:
    option = site.memory_option
    if launch.mem_gb is None or option == "none":
        return {}
    if launch.mem_gb == 0:
        return {"mem": "0"}
    if launch.gpus_per_run is not None and option == "mem-per-gpu":
        option = "mem"  # the job has no whole GPU
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


def _check_text(key: str, value: str, longest: int = _LONGEST) -> str:
    """Return the value if it can be written in an #SBATCH line."""
    if bad := [char for char in value if unicodedata.category(char) in ("Cc", "Cs")]:
        raise ConfigError(
            f"{key}={value!r}: {bad[0]!r} cannot stand in a line of a batch script; no newlines "
            "or control characters"
        )
    if (size := len(os.fsencode(value))) > longest:
        raise ConfigError(f"{key}={value[:60]!r}…: {size} bytes, but Slurm takes {longest}")
    return value


def joined_hosts(*lists: str) -> str:
    """Return one list of hosts for Slurm from several; each text is a name or a list of Slurm's."""
    return ",".join(dict.fromkeys(filter(None, lists)))


def check_folder(output_dir: str, folder: Path) -> None:
    r"""Check that Slurm can write logs into the folder of an array.

    In the path of a log, a backslash switches all patterns such as `%A` off. An escaped percent
    sign (`%%`) is misread by srun 22.05. So the path may contain neither. It is a ConfigError if it
    does, or is too long.
    """
    _check_text("output_dir", str(folder), _LONGEST_PATH)
    if bad := [char for char in "%\\" if char in str(folder)]:
        raise ConfigError(
            f"output_dir={output_dir!r}: Slurm reads {bad[0]!r} in the path of a log as a "
            "pattern; choose another"
        )


_NAMED = (*("partition", "account", "qos", "constraint"),)
_OWN_KEYS = {
    "nodes": "launch.nodes",
    "no-kill": "launch.spares",
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
