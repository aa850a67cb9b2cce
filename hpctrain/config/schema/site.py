"""The keys of `site`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hpctrain.config.schema.key import key, section


@dataclass
class ContainerConfig:
    """The image in which the ranks run; the batch script with Slurm's commands stays outside."""

    runtime: str | None = key(
        None,
        "This program starts the container; pyxis is a plugin of srun. With command, `args` are "
        "the words that stand before Python. Null means no container.",
        choices=(None, "apptainer", "singularity", "pyxis", "command"),
    )
    image: str | None = key(
        None,
        "The image is FILE.sif, docker://..., or a name that enroot knows. With pyxis, null means "
        "the one that `args` name, such as --environment=FILE, which mounts the folders, too.",
    )
    python: str = key("python", "Inside the image, Python is this command.")
    binds: list[str] = key(
        [],
        "These folders are visible inside, as FROM[:TO[:OPTIONS]]; the folders of the run always "
        "are.",
    )
    args: list[str] = key(
        [],
        "`apptainer exec`, or with pyxis srun, gets these arguments too. With runtime=command they "
        "are the whole command, such as [shifter, --image=me/hpctrain:1]: it must let the ranks "
        "see the environment, the GPUs, output_dir, data.path and the code.",
    )


@dataclass
class SiteConfig:
    """How one cluster wants jobs to be described; conf/site/example.yaml has all of it."""

    partition: str | None = key(None, "Jobs go to this partition. Null means the default one.")
    account: str | None = key(None, "Jobs are billed to this account.")
    qos: str | None = key(None, "Jobs have this quality of service.")
    constraint: str | None = key(None, "Jobs need nodes with these features.")
    memory_option: str = key(
        "mem",
        "launch.mem_gb is requested by this sbatch option; none does not request memory.",
        choices=("mem", "mem-per-cpu", "mem-per-gpu", "none"),
    )
    gpu_option: str = key(
        "gpus-per-node",
        "launch.gpus_per_node is requested by this sbatch option. srun: jobs get whole nodes with "
        "their GPUs, and only srun requests them, as a step gets none otherwise. none does not "
        "request GPUs. The ranks of a node always see all its GPUs, as NCCL needs it.",
        choices=("gpus-per-node", "gres", "gpus-per-task", "srun", "none"),
    )
    gpu_type: str | None = key(
        None, "GPUs are requested by this type: a100 gives gpu:a100:4 (gres) or a100:4."
    )
    modules: list[str] = key(
        [],
        "The script first loads these modules. purge, reset and what has a space, such as use "
        "/sw/modules, are commands of `module` itself, in the order that you give.",
    )
    env: dict[str, str] = key({}, "Every rank has these variables, and so has the script.")
    setup: list[str] = key([], "These shell commands run before srun. If one fails, the job ends.")
    sbatch: dict[str, Any] = key(
        {},
        "sbatch gets these options too, such as {reservation: NAME, mail-type: FAIL}. distribution "
        "is block:block by default: the first ranks of a node are on its first socket, where its "
        "first GPUs usually are. Null leaves an option to Slurm.",
    )
    srun: list[str] = key([], "srun gets these arguments too, such as [--cpu-bind=cores].")
    container: ContainerConfig = section(ContainerConfig)
