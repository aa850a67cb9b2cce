"""Runs on this machine, without a cluster: submitit's local controller starts the same command.

    run ── start ── submitit's controller process ── ranks, for a LocalRunJob

A terminal shows a bar over the runs, and a log has plain lines:

    1 of 4 starts: digits-5f764f66 lr=0.001 seed=0
    1 of 4 is finished after 0:00:12: digits-5f764f66 lr=0.001 seed=0, val/accuracy 0.9712
    running ━━━╸━━━━━━ 1/4 0:00:31 digits-fe650090 lr=0.001 seed=1: step 220/660
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
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

from submitit.local.local import start_controller

from hpctrain.config.rank_counts import fitting_nodes
from hpctrain.config.schema import Config, LaunchConfig
from hpctrain.console import Cell
from hpctrain.errors import ConfigError, DamageError
from hpctrain.launch.entry import Entry
from hpctrain.launch.jobs import LocalRunJob
from hpctrain.launch.output import Bars, say
from hpctrain.run_record import Progress
from hpctrain.runs.code.snapshot import Snapshot
from hpctrain.runs.sweep_overrides import label
from hpctrain.slurm import sbatch
from hpctrain.slurm.job_environment import keep_gpus

_LOOK_S = 1.0


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
    """Run the runs on this machine, one after the other, and show how far they are.

    It sets their `state`, `handle` and `job`. After Ctrl-C it raises KeyboardInterrupt when the
    ranks have saved.
    """
    with LocalProgress(len(entries)) as progress:
        for entry in entries:
            progress.begin(entry)
            _run(entry, progress)
            entry.read_end(otherwise="lost")
            progress.end(entry)


def _run(entry: Entry, progress: LocalProgress) -> None:
    command = [sys.executable, "-u", "-m", "hpctrain", "run", str(entry.run.path)]
    entry.job, process = start(entry.config.launch, entry.run.logs, entry.code, command)
    entry.handle = LocalRunJob(entry.run, entry.config.metric, entry.job, process)
    try:
        while True:
            try:
                process.wait(_LOOK_S)
                break
            except subprocess.TimeoutExpired:
                progress.look(entry)
    except KeyboardInterrupt:
        entry.handle.cancel()
        process.wait()
        raise


class LocalProgress(Bars):
    """Shows runs that run one after the other."""

    def __init__(self, count: int) -> None:
        super().__init__("running", width=10)
        self._count, self._begun = count, 0
        self._bar = self.add_task("", total=count, note="")

    def begin(self, entry: Entry) -> None:
        """Show that a run starts."""
        self._begun += 1
        self._since = time.monotonic()
        if self.disable:
            say(f"{self._begun} of {self._count} starts: {_name(entry)}")
        self.look(entry)

    def look(self, entry: Entry) -> None:
        """Show how far the run is."""
        if not self.disable:
            note = f"{_name(entry)}{_reached(entry.run.path)}"
            self.update(self._bar, completed=self._begun - 1, note=note, refresh=True)

    def end(self, entry: Entry) -> None:
        """Show how the run has ended: `entry.state`."""
        took, value = timedelta(seconds=round(time.monotonic() - self._since)), entry.metric()
        metric = "" if value is None else f", {entry.config.metric} {value:.4g}"
        line = f"{self._begun} of {self._count} is {entry.state} after {took}: {_name(entry)}"
        if self.disable:
            say(f"{line}{metric}")
        else:
            self.console.print(Cell(f"{line}{metric}"))
            self.update(self._bar, completed=self._begun, note="")


def _name(entry: Entry) -> str:
    return f"{entry.run.name} {label(entry.swept)}".rstrip()


def _reached(run: Path) -> str:
    """Return the step and the main metric as `: step 220/660, val/accuracy 0.97`, or ""."""
    with suppress(DamageError):
        found = Progress.of(run)
        if found.step is not None:
            value = found.metrics.get(found.metric)
            text = f": step {found.step}/{found.max_steps}"
            return text if value is None else f"{text}, {found.metric} {value:.4g}"
    return ""
