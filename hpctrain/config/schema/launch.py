"""The keys of `launch`."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from hpctrain.config.schema.key import TOO_LARGE, key
from hpctrain.errors import ConfigError

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


def _check_minutes(minutes: int | str) -> str:
    if minutes == "auto":
        return ""
    if not isinstance(minutes, int):
        return "it must be a whole number of minutes, or auto"
    if minutes < 1:
        return "it must be at least 1, or auto"
    return "" if minutes < TOO_LARGE else "it must be less than 2^62"


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
    time_min: int | str = key(
        60,
        "The job has this time limit. auto takes it from a measured run of the same model in "
        "output_dir, with a margin, before the job is queued.",
        unit="minutes",
        check=_check_minutes,
    )
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
    wait: bool = key(
        False,
        "The command waits for the jobs and returns the metric, as sweepers such as Optuna need.",
    )
    preflight: str = key(
        "quick",
        "Every job of Slurm first checks its nodes: GPUs, versions, limits, disks and clocks, in "
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

    @property
    def limit_min(self) -> int:
        """The minutes of `time_min`; auto, which only a training can have, is a ConfigError."""
        if not isinstance(self.time_min, int):
            raise ConfigError(
                f"launch.time_min={self.time_min}: there is no measured run for this job; give a "
                "number of minutes"
            )
        return self.time_min
