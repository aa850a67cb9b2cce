"""The sbatch script of an array of runs, as text; a pure function.

Each array task finds its run directory by its number, through a link, so that the script holds no
name that a shell could misread and the job starts from files alone:

    array-0/job.sh   array-0/tasks/0 -> runs/digits-3fa92c1b   array-0/tasks/1 -> …
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

from submitit.slurm.slurm import _convert_mem, _make_sbatch_string

from hpctrain.config import Config
from hpctrain.errors import ConfigError


def sbatch_script(config: Config, folder: Path, count: int) -> str:
    """The script for `count` runs that ask for the same resources.

    Args:
        config: any of the runs': its `launch` and `site` sections are used.
        folder: absolute; holds `tasks/0` … `tasks/COUNT-1`, links to the run directories.
        count: array tasks.

    Raises:
        ConfigError: `site.sbatch` names an option that has a key of its own.
    """
    launch, site = config.launch, config.site
    for option in site.sbatch:
        if (key := _OWN_KEYS.get(option.replace("_", "-"))) is not None:
            raise ConfigError(f"site.sbatch.{option}={site.sbatch[option]}: say it with {key}")
    exports = {"OMP_NUM_THREADS": str(launch.cpus_per_task), **site.env}
    setup = [
        "set -euo pipefail",
        *site.setup,
        *(f"export {name}={shlex.quote(value)}" for name, value in exports.items()),
        f'run={shlex.quote(str(folder / "tasks"))}/"$SLURM_ARRAY_TASK_ID"',
    ]
    srun = [
        "exec srun --unbuffered --open-mode=append --kill-on-bad-exit=1",
        # Since Slurm 22.05 srun does not inherit it.
        f"--cpus-per-task={launch.cpus_per_task}",
        '--output="$run"/logs/%A_%a.rank%t.log',
        *map(shlex.quote, site.srun),
        f'{shlex.quote(sys.executable)} -u -m hpctrain run "$run"',
    ]
    script: str = _make_sbatch_string(
        command=" ".join(srun),
        folder=folder / "batch",
        job_name=config.name,
        partition=site.partition,
        account=site.account,
        qos=site.qos,
        constraint=site.constraint,
        time=launch.time_min,
        nodes=launch.nodes,
        ntasks_per_node=launch.tasks_per_node,
        cpus_per_task=launch.cpus_per_task,
        gpus_per_node=launch.gpus_per_node or None,
        mem=None if launch.mem_gb is None else _convert_mem(launch.mem_gb),
        signal_delay_s=launch.warn_s,
        setup=setup,
        map_count=count,
        array_parallelism=launch.max_running,
        stderr_to_stdout=True,
        use_srun=False,  # submitit's own srun line knows neither run directories nor restarts
        wckey=None,
        additional_parameters={"requeue": True, **site.sbatch},
    )
    return script


_OWN_KEYS = {
    "nodes": "launch.nodes",
    "ntasks-per-node": "launch.tasks_per_node",
    "cpus-per-task": "launch.cpus_per_task",
    "gpus-per-node": "launch.gpus_per_node",
    "mem": "launch.mem_gb",
    "time": "launch.time_min",
    "signal": "launch.warn_s",
    "array": "launch.max_running",
    "job-name": "name",
    "partition": "site.partition",
    "account": "site.account",
    "qos": "site.qos",
    "constraint": "site.constraint",
}
