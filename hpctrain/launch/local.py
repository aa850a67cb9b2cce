"""Without a cluster: submitit's local executor runs the same command, one run after the other."""

from __future__ import annotations

import os
import shlex
import signal
import sys

from submitit import LocalExecutor

from hpctrain.config.schema import Config
from hpctrain.errors import ConfigError
from hpctrain.runs.run_dir import RunDir
from hpctrain.runs.snapshot import Snapshot


def run(config: Config, run: RunDir, code: Snapshot | None) -> tuple[str, str]:
    """Run on this machine and wait.

    Args:
        config: its `launch` section says how many ranks; one node only.
        run: the frozen run directory.
        code: what it runs from; None: the code as it is.

    Returns:
        The state it ended in and the id of submitit's local job.

    Raises:
        KeyboardInterrupt: after the ranks have saved.
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
    # Ctrl-C reaches the whole terminal, and submitit's controller would kill the ranks at once:
    # it inherits that SIGINT is ignored, and we pass the wish on as one that lets them save.
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
    """Refuse what one machine cannot do, before anything starts."""
    if config.launch.nodes > 1:
        raise ConfigError(
            f"launch.nodes={config.launch.nodes}: sbatch is not on the PATH, and without a cluster "
            "a run has one node; launch.nodes=1, or try slurm/dev-cluster up"
        )
