"""Executors of submitit that start runs: `Executor` on Slurm, `LocalExecutor` on this machine.

    Array ── Executor.submit_runs ── our script ── sbatch ── RunJob, one for each array task
    run ──── LocalExecutor.start ── submitit's controller ── ranks, for a LocalRunJob

The runs are frozen before, so nothing is pickled: each job runs `python -m hpctrain run DIR`.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import submitit

from hpctrain.config.schema import Config, LaunchConfig
from hpctrain.launch.jobs import LocalRunJob, RunJob
from hpctrain.runs.code.snapshot import Snapshot
from hpctrain.runs.run_dir import RunDir
from hpctrain.slurm import sbatch
from hpctrain.slurm.job_environment import keep_gpus


class Executor(submitit.SlurmExecutor):  # type: ignore[misc]
    """Submits one batch script of ours, as a job array; `sbatch` inherits the locks."""

    job_class = RunJob

    def __init__(self, script: Path, config: Config, inherit: Sequence[int] = ()) -> None:
        super().__init__(folder=script.parent)
        self.script, self._config, self._inherit = script, config, inherit

    @classmethod
    def affinity(cls) -> int:
        """Return submitit's rank of this executor: it is used where it is named."""
        return 1

    def submit_runs(self, runs: Sequence[tuple[RunDir, str]]) -> list[RunJob]:
        """Submit the script, whose array task i runs the i-th run; it raises what `sbatch` raises.

        A frozen run comes with its config key `metric`.
        """
        array = self.submit_script()
        return [
            RunJob(run, metric, f"{array}_{task}", self.script)
            for task, (run, metric) in enumerate(runs)
        ]

    def submit_script(self) -> str:
        """Submit the script and return the id of the array. It raises what `submit_runs` raises."""
        return str(self._submit_command(shlex.quote(str(self.script))))

    def _make_submission_file_text(self, command: str, uid: str) -> str:
        return self.script.read_text()

    def _submit_command(self, command: str) -> Any:
        return sbatch.sbatch(self.script, self._config, self._inherit)

    def _internal_process_submissions(self, delayed_submissions: Any) -> Any:
        raise NotImplementedError("runs are submitted by submit_runs, functions by submit_function")


class LocalExecutor(submitit.LocalExecutor):  # type: ignore[misc]
    """Starts the ranks of one job here, from a code snapshot or the code as it is."""

    job_class = LocalRunJob

    def __init__(self, launch: LaunchConfig, logs: Path, code: Snapshot | None) -> None:
        super().__init__(folder=logs)
        self._code = code
        self.update_parameters(
            tasks_per_node=launch.tasks_per_node,
            timeout_min=launch.limit_min,
            signal_delay_s=launch.warn_s,
            stderr_to_stdout=True,
        )

    def start(self, command: Sequence[str]) -> tuple[str, subprocess.Popen[bytes]]:
        """Start the ranks with this command; return the id of the job and its controller."""
        job = self._submit_command(shlex.join(command))
        return job.job_id, job._process

    def _submit_command(self, command: str) -> Any:
        # Ctrl-C reaches every process of the terminal, and submitit's controller would kill the
        # ranks at once. So the controller inherits that SIGINT is ignored, and we send it SIGTERM
        # instead, with which the ranks can save.
        # Only the main thread can do that.
        main = threading.current_thread() is threading.main_thread()
        handler = signal.signal(signal.SIGINT, signal.SIG_IGN) if main else None
        environment = dict(os.environ)
        try:
            keep_gpus()
            if self._code:
                before = filter(None, [environment.get("PYTHONPATH")])
                paths = [*map(str, self._code.pythonpath), *before]
                os.environ |= {"PYTHONPATH": ":".join(paths), "PYTHONSAFEPATH": "1"}
            return super()._submit_command(command)
        finally:
            if main:
                signal.signal(signal.SIGINT, handler)
            os.environ.clear()
            os.environ |= environment
