"""Runs on this machine, without a cluster: submitit's local executor runs the same command."""

from __future__ import annotations

import os
import shlex
import signal
import sys

from submitit import LocalExecutor

from hpctrain.config.schema import Config
from hpctrain.config.validate import fitting_nodes
from hpctrain.errors import ConfigError
from hpctrain.runs.run_dir import RunDir
from hpctrain.runs.snapshot import Snapshot


def run(config: Config, run: RunDir, code: Snapshot | None) -> tuple[str, str]:
    """Run on this machine and wait for the end.

    Args:
        config: The config; `launch` says how many ranks, on one node.
        run: The run directory, with a frozen config.
        code: The code snapshot to run from; None means the code as it is.

    Returns:
        The final state of the run and the id of submitit's local job.

    Raises:
        KeyboardInterrupt: The user has pressed Ctrl-C, and the ranks have saved.
    """
    launch = config.launch
    executor = LocalExecutor(folder=run.logs)
    executor.update_parameters(
        tasks_per_node=launch.tasks_per_node,
        gpus_per_node=launch.gpus_per_node,
        timeout_min=launch.time_min,
        signal_delay_s=launch.warn_s,
        stderr_to_stdout=True,
    )
    command = shlex.join([sys.executable, "-u", "-m", "hpctrain", "run", str(run.path)])
    # Ctrl-C reaches every process of the terminal, and submitit's controller would kill the ranks
    # at once. So the controller inherits that SIGINT is ignored, and we send it SIGTERM instead,
    # with which the ranks can save.
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    environment = dict(os.environ)
    try:
        if code:
            paths = [*map(str, code.pythonpath), *filter(None, [environment.get("PYTHONPATH")])]
            os.environ |= {"PYTHONPATH": ":".join(paths), "PYTHONSAFEPATH": "1"}
        job = executor._submit_command(command)
    finally:
        signal.signal(signal.SIGINT, handler)
        os.environ.clear()
        os.environ |= environment
    try:
        job._process.wait()
    except KeyboardInterrupt:
        job._process.terminate()
        job._process.wait()
        raise
    return str(run.read().get("state", "lost")), job.job_id


def check(config: Config) -> None:
    """Check that the run can run on one machine.

    Raises:
        ConfigError: It needs several nodes.
    """
    if 1 not in fitting_nodes(config):
        raise ConfigError(
            f"launch.nodes={config.launch.nodes}: sbatch is not on the PATH, and without a cluster "
            "a run has one node; launch.nodes=1, or try slurm/dev-cluster up"
        )
