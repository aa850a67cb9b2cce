"""The keys of `launch`."""

from __future__ import annotations

from dataclasses import dataclass

from hpctrain.config.schema.key import key


@dataclass
class LaunchConfig:
    """The resources of a job and how it is submitted, the same for every way of launching."""

    nodes: int = key(1, "A job runs on this many nodes.", unit="nodes", at_least=1)
    tasks_per_node: int = key(1, "Each node runs this many ranks.", unit="ranks", at_least=1)
    gpus_per_node: int = key(
        0,
        "Each node provides this many GPUs, a multiple of tasks_per_node.",
        unit="GPUs",
        at_least=0,
    )
    cpus_per_task: int = key(1, "Each rank gets this many CPU cores.", unit="cores", at_least=1)
    mem_gb: float | None = key(
        None,
        "Each node provides this much memory. Null means the cluster's default.",
        unit="GB",
        above=0,
    )
    time_min: int = key(60, "The job has this time limit.", unit="minutes", at_least=1)
    warn_s: int = key(
        120,
        "This long before its time limit a job saves and requeues itself.",
        unit="seconds",
        at_least=1,
    )
    max_running: int | None = key(
        None,
        "At most this many jobs of a sweep run at a time. Null means no limit of ours.",
        unit="jobs",
        at_least=1,
    )
    rerun: str = key(
        "failed",
        "Runs that exist are submitted again if they have not finished (failed), even if they have "
        "(all), or never (none).",
        choices=("failed", "all", "none"),
    )
    snapshot: str = key(
        "auto",
        "Jobs run from a copy of the code: if it is in git (auto), always (git: without git the "
        "submission fails), or never (off).",
        choices=("auto", "git", "off"),
    )
    snapshot_max_mb: float = key(
        50.0, "A copy of the code has at most this size.", unit="MB", above=0
    )
    wait: bool = key(
        False,
        "The command waits for the jobs and returns the metric, as sweepers such as Optuna need.",
    )
    check: bool = key(
        False, "The scheduler is asked first whether, and when, it would run the jobs."
    )
    dry_run: bool = key(False, "The sbatch script is printed and nothing is submitted.")
