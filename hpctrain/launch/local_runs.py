"""Runs on this machine, without a cluster: submitit's local executor starts the same command.

1 of 4 starts: digits-5f764f66 lr=0.001 seed=0
1 of 4 is finished after 0:00:12: digits-5f764f66 lr=0.001 seed=0, val/accuracy 0.9712
"""

from __future__ import annotations

import time
from datetime import timedelta

from hpctrain.base.errors import ConfigError
from hpctrain.base.terminal.console import say
from hpctrain.cluster.slurm import sbatch
from hpctrain.config.job_request import JobRequest
from hpctrain.launch.entry import Entry
from hpctrain.launch.executors import LocalExecutor
from hpctrain.launch.jobs import LocalRunJob
from hpctrain.runs.sweep_overrides import label


def check(job: JobRequest) -> None:
    """Check that the job needs only one machine."""
    if 1 not in job.nodes:
        reason = "sbatch is not on the PATH, and without a cluster"
        cure = "python -m hpctrain cluster up"
        if sbatch.available():
            reason, cure = "with hydra/launcher=submitit_local", "hydra/launcher=submitit_slurm"
        raise ConfigError(
            f"launch.nodes={job.launch.nodes}: {reason} a run has one node; launch.nodes=1, "
            f"or try {cure}"
        )


def run_all(entries: list[Entry]) -> None:
    """Run the runs on this machine, one after the other, and say when each starts and ends.

    It sets their `state`, `handle` and `job`. After Ctrl-C it raises KeyboardInterrupt when the
    ranks have saved.
    """
    for number, entry in enumerate(entries, 1):
        begun, place = time.monotonic(), f"{number} of {len(entries)}"
        say(f"{place} starts: {_name(entry)}")
        _run(entry)
        entry.read_end(otherwise="lost")
        took, value = timedelta(seconds=round(time.monotonic() - begun)), entry.metric()
        metric = "" if value is None else f", {entry.config.metric} {value:.4g}"
        say(f"{place} is {entry.state} after {took}: {_name(entry)}{metric}")


def _run(entry: Entry) -> None:
    executor = LocalExecutor(entry.run.path, entry.config.launch, entry.code)
    entry.handle = job = executor.submit(LocalRunJob, entry.run, entry.config.metric)
    entry.job = job.job_id
    try:
        job.wait()
    except KeyboardInterrupt:
        job.cancel()
        job.wait()
        raise


def _name(entry: Entry) -> str:
    return f"{entry.run.name} {label(entry.swept)}".rstrip()
