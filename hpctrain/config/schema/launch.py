"""The keys of `launch` and `site`: what a job gets, and how a cluster wants it to be described."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

from hpctrain.base.errors import ConfigError
from hpctrain.config.schema.key import TOO_LARGE, key, section

_MOST = 10_000  # numbers in a range: each is checked before a job is queued


def _check_nodes(nodes: int | str) -> str:
    found = re.fullmatch(r"([0-9]+)-([0-9]+)", nodes) if isinstance(nodes, str) else None
    if isinstance(nodes, str) and found is None:
        return "it must be a number of nodes, such as 4, or a range, such as 4-8"
    first, last = (int(found[1]), int(found[2])) if found else (int(nodes), int(nodes))
    if not 1 <= first < TOO_LARGE:
        return "it must be at least 1" if first < 1 else "it must be less than 2^62"
    if last < first:
        return f"a range begins with the smaller number: {last}-{first}"
    return f"a range has at most {_MOST} numbers" if last - first >= _MOST else ""


@dataclass
class LaunchConfig:
    """The resources of a job and how it is submitted, the same for every way of launching."""

    nodes: int | str = key(
        1,
        "A job runs on this many nodes. A range, such as 4-8, lets the job start on as many of "
        "them as are free. The global batch stays the same, and the degree of parallel that is -1 "
        "takes the number of ranks that there are.",
        unit="nodes",
        check=_check_nodes,
    )
    spares: int = key(
        0,
        "A job has this many nodes more than its ranks need, which count as used. When a node is "
        "lost or excluded, the run goes on in the same job with a spare in its place.",
        unit="nodes",
        at_least=0,
    )
    tasks_per_node: int = key(1, "Each node runs this many ranks.", count="ranks")
    gpus_per_node: int = key(
        0,
        "Each node provides this many GPUs, a multiple of tasks_per_node.",
        unit="GPUs",
        at_least=0,
    )
    gpus_per_run: float | None = key(
        None,
        "A run of one rank has this share of a GPU and of its memory, such as 0.25, and other runs "
        "of the pack or other jobs have the rest. The site must offer parts of GPUs as gres shard "
        "or mps. Null means whole GPUs.",
        unit="GPUs",
        at_least=0.01,
        at_most=0.99,
    )
    cpus_per_task: int = key(1, "Each rank gets this many CPU cores.", count="cores")
    mem_gb: float | None = key(
        None,
        "Each node provides this much memory. 0 is all memory of the nodes (--mem=0), and null the "
        "cluster's default.",
        unit="GiB",
        at_least=0,
    )
    time_min: int = key(60, "The job has this time limit.", count="minutes")
    warn_s: int = key(
        120,
        "At least this long before its time limit a job saves and requeues itself; longer, if a "
        "step and a save of the run have taken longer.",
        count="seconds",
    )
    max_running: int | None = key(
        None,
        "At most this many jobs of a sweep run at a time. Null means no limit of ours.",
        count="jobs",
    )
    pack: int = key(
        1,
        "This many runs of a sweep share one job, which asks for the resources of all of them on "
        "each node. Each run has its own share, and one that fails leaves the others.",
        count="runs",
    )
    max_jobs: int | None = key(
        None,
        "A command (-m) queues at most this many jobs, those of chains counted; else nothing is "
        "queued. Null means no limit of ours.",
        count="jobs",
    )
    budget_gpu_hours: float | None = key(
        None,
        "The jobs of a sweep or a search (-m), each up to its time limit, take at most so many "
        "hours together, times GPUs, or ranks where they have no GPUs; else nothing is queued. A "
        "job that is requeued begins its time again.",
        unit="GPU-hours",
        above=0,
    )
    chain: int | None = key(
        None,
        "This many jobs are queued for each run, one after another: when Slurm has cancelled one, "
        "the next goes on from the last checkpoint. Null means 3 where the partition cancels "
        "preempted jobs at once, and else one, which is requeued.",
        count="jobs",
    )
    rerun: str = key(
        "failed",
        "Runs that exist are submitted again if they have not finished (failed), even if they have "
        "(all), or never (none).",
        choices=("failed", "all", "none"),
    )
    snapshot: str = key(
        "auto",
        "Jobs run from a copy of the code, if it is in git (auto), or never (off).",
        choices=("auto", "off"),
    )
    environment: str = key(
        "shared",
        "Ranks of Slurm's jobs import Python's packages from where they are installed (shared), or "
        "from a copy that each node unpacks once into SLURM_TMPDIR, TMPDIR or /tmp, and that "
        "travels as one file (image): for slow shared file systems.",
        choices=("shared", "image"),
    )
    wait: bool = key(
        False,
        "The command waits for the jobs and returns the metric, as sweepers such as Optuna need.",
    )
    preflight: str = key(
        "quick",
        "Every job of Slurm first checks its nodes: GPUs, versions, limits and disks, in "
        "less than 2 seconds (quick), and the speed of GPUs and links too (full), or nothing "
        "(off). A job on a node that fails is put back into the queue, without this node.",
        choices=("quick", "full", "off"),
    )
    dry_run: bool = key(False, "The sbatch script is printed and nothing is submitted.")

    @property
    def node_numbers(self) -> range:
        """The numbers of nodes that the job may have; one, unless `nodes` is a range."""
        if wrong := _check_nodes(self.nodes):
            raise ConfigError(f"launch.nodes={self.nodes!r}: {wrong}")
        first, _, last = str(self.nodes).partition("-")
        return range(int(first), int(last or first) + 1)

    @property
    def of_job(self) -> LaunchConfig:
        """The resources of a whole job, which `pack` runs share."""
        whole = self.gpus_per_run is None  # else the runs share one GPU
        return replace(
            self,
            tasks_per_node=self.pack * self.tasks_per_node,
            gpus_per_node=self.gpus_per_node * (self.pack if whole else 1),
            mem_gb=None if self.mem_gb is None else self.pack * self.mem_gb,
        )


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
    rules: str | None = key(
        None,
        "This file has what the site polices, such as idle GPUs, each with its limit and the "
        "site's words: status, report and doctor say them before the site does.",
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
