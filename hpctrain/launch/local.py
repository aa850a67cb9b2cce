"""Runs on this machine, without a cluster: submitit's local executor runs the same command."""

from __future__ import annotations

import sys

from hpctrain.config.schema import Config
from hpctrain.config.validate import fitting_nodes
from hpctrain.errors import ConfigError
from hpctrain.launch import slurm
from hpctrain.launch.executor import LocalExecutor
from hpctrain.launch.jobs import LocalRunJob
from hpctrain.runs.run_dir import RunDir
from hpctrain.runs.snapshot import Snapshot


def run(config: Config, run: RunDir, code: Snapshot | None) -> LocalRunJob:
    """Run on this machine and wait for the end.

    Args:
        config: The config; `launch` says how many ranks, on one node.
        run: The run directory, with a frozen config.
        code: The code snapshot to run from; None means the code as it is.

    Returns:
        The job of submitit, which has ended.

    Raises:
        KeyboardInterrupt: The user has pressed Ctrl-C, and the ranks have saved.
    """
    command = [sys.executable, "-u", "-m", "hpctrain", "run", str(run.path)]
    job = LocalRunJob(run, config.metric, *LocalExecutor(config, run.logs, code).start(command))
    try:
        job._process.wait()
    except KeyboardInterrupt:
        job.cancel()
        job._process.wait()
        raise
    return job


def check(config: Config) -> None:
    """Check that the run can run on one machine.

    Raises:
        ConfigError: It needs several nodes.
    """
    if 1 not in fitting_nodes(config):
        reason, cure = "sbatch is not on the PATH, and without a cluster", "slurm/dev-cluster up"
        if slurm.available():
            reason, cure = "with hydra/launcher=submitit_local", "hydra/launcher=submitit_slurm"
        raise ConfigError(
            f"launch.nodes={config.launch.nodes}: {reason} a run has one node; launch.nodes=1, "
            f"or try {cure}"
        )
