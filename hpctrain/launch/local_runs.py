"""Runs on this machine, without a cluster: submitit's local controller starts the same command.

1 of 4 starts: digits-5f764f66 lr=0.001 seed=0
1 of 4 is finished after 0:00:12: digits-5f764f66 lr=0.001 seed=0, val/accuracy 0.9712
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

from submitit.local.local import start_controller

from hpctrain.cluster.slurm import sbatch
from hpctrain.cluster.slurm.job_environment import keep_gpus
from hpctrain.config.rank_counts import fitting_nodes
from hpctrain.config.schema import Config, LaunchConfig
from hpctrain.errors import ConfigError
from hpctrain.launch.entry import Entry
from hpctrain.launch.jobs import LocalRunJob
from hpctrain.launch.output import say
from hpctrain.runs.code.snapshot import Snapshot
from hpctrain.runs.sweep_overrides import label


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


def start(
    launch: LaunchConfig, logs: Path, code: Snapshot | None, command: Sequence[str]
) -> tuple[str, subprocess.Popen[bytes]]:
    """Start the ranks of a job here, from a code snapshot or the code as it is.

    Return the id of the job, and its controller process, which passes signals on to the ranks.
    """
    logs = logs.absolute()
    logs.mkdir(parents=True, exist_ok=True)
    # Ctrl-C reaches every process of the terminal, and submitit's controller would kill the ranks
    # at once. So the controller inherits that SIGINT is ignored, and we send it SIGTERM instead,
    # with which the ranks can save. Only the main thread can do that.
    main = threading.current_thread() is threading.main_thread()
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN) if main else None
    environment = dict(os.environ)
    try:
        keep_gpus()
        if code:
            before = filter(None, [environment.get("PYTHONPATH")])
            paths = [*map(str, code.pythonpath), *before]
            os.environ |= {"PYTHONPATH": ":".join(paths), "PYTHONSAFEPATH": "1"}
        process = start_controller(
            logs,
            shlex.join(command),
            tasks_per_node=launch.tasks_per_node,
            timeout_min=launch.limit_min,
            signal_delay_s=launch.warn_s,
            stderr_to_stdout=True,
        )
    finally:
        if main:
            signal.signal(signal.SIGINT, handler)
        os.environ.clear()
        os.environ |= environment
    return str(process.pid), process


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
    command = [sys.executable, "-u", "-m", "hpctrain", "run", str(entry.run.path)]
    entry.job, process = start(entry.config.launch, entry.run.logs, entry.code, command)
    entry.handle = LocalRunJob(entry.run, entry.config.metric, entry.job, process)
    try:
        process.wait()
    except KeyboardInterrupt:
        entry.handle.cancel()
        process.wait()
        raise


def _name(entry: Entry) -> str:
    return f"{entry.run.name} {label(entry.swept)}".rstrip()
