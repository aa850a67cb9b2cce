"""Runs on this machine, without a cluster: submitit's local executor runs the same command."""

from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import Callable

from hpctrain.config.rank_counts import fitting_nodes
from hpctrain.config.schema import Config
from hpctrain.errors import ConfigError
from hpctrain.launch.arrays import Entry
from hpctrain.launch.executor import LocalExecutor
from hpctrain.launch.jobs import LocalRunJob
from hpctrain.launch.local_progress import LocalProgress
from hpctrain.runs.code.snapshot import Snapshot
from hpctrain.runs.run_dir import RunDir
from hpctrain.slurm import sbatch

_LOOK_S = 1.0


def run_all(entries: list[Entry]) -> None:
    """Run the runs on this machine, one after the other, and show how far they are.

    It sets their `state`, `handle` and `job`. After Ctrl-C it raises KeyboardInterrupt when the
    ranks have saved.
    """
    with LocalProgress(len(entries)) as progress:
        for entry in entries:
            progress.begin(entry)
            look = functools.partial(progress.look, entry)
            entry.handle = run(entry.config, entry.run, entry.code, look)
            entry.state = entry.run.read().state or "lost"
            entry.job = entry.handle.job_id
            progress.end(entry)


def run(
    config: Config, run: RunDir, code: Snapshot | None, look: Callable[[], None]
) -> LocalRunJob:
    """Run a frozen run on this machine and return its job of submitit, which has ended.

    `look` is called every second. After Ctrl-C it raises KeyboardInterrupt when the ranks have
    saved.
    """
    command = [sys.executable, "-u", "-m", "hpctrain", "run", str(run.path)]
    job = LocalRunJob(
        run, config.metric, *LocalExecutor(config.launch, run.logs, code).start(command)
    )
    try:
        while True:
            try:
                job._process.wait(_LOOK_S)
                break
            except subprocess.TimeoutExpired:
                look()
    except KeyboardInterrupt:
        job.cancel()
        job._process.wait()
        raise
    return job


def check(config: Config) -> None:
    """Check that the run needs only one machine."""
    if 1 not in fitting_nodes(config):
        reason, cure = "sbatch is not on the PATH, and without a cluster", "slurm/dev-cluster up"
        if sbatch.available():
            reason, cure = "with hydra/launcher=submitit_local", "hydra/launcher=submitit_slurm"
        raise ConfigError(
            f"launch.nodes={config.launch.nodes}: {reason} a run has one node; launch.nodes=1, "
            f"or try {cure}"
        )
