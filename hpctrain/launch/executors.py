"""submitit's executors, on which everything goes that we submit: what a job reads is a folder.

    SlurmExecutor(folder, config).map_array(RunJob, runs, …) ── job.sh, sbatch ── RunJobs
    LocalExecutor(run.path, launch, code).submit(LocalRunJob, run, …) ── LocalRunJob

submitit gives a job a pickle; here each rank calls `python -m hpctrain COMMAND FOLDER`, which reads
our files: `run` those of a run, `call` those of a function, `work` those of a search's worker. So
`submit` and `map_array` take no function, but the class of the job and what it is made of.
"""

from __future__ import annotations

import logging
import os
import shlex
import shutil
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from subprocess import Popen
from typing import Any

import submitit

from hpctrain.base import offered
from hpctrain.base.errors import LaunchError
from hpctrain.base.files.disk import write_atomically
from hpctrain.cluster.slurm import sbatch
from hpctrain.cluster.slurm.job_environment import keep_gpus
from hpctrain.cluster.slurm.script import sbatch_script
from hpctrain.config.job_request import JobRequest
from hpctrain.config.schema import LaunchConfig
from hpctrain.runs.code.snapshot import Snapshot

log = logging.getLogger(__name__)


class SlurmExecutor(submitit.SlurmExecutor):  # type: ignore[misc]
    """Submits the folders of jobs as one job array.

    Args:
        folder: That of the array, absolute: it gets `job.sh`, `tasks`, `batch` and `job_id` (see
            `hpctrain.launch.arrays`).
        request: What the jobs ask for.
        count: The number of job folders; `launch.pack` of them share an array task.
        command: What each rank calls with the folder of the job: `run`, `call` or `work`.
        links: So many times the script is queued, as the chain of one run.
        **script: The other arguments of `sbatch_script`.

    Attributes:
        locks: The file descriptors of locks that `sbatch` inherits.
    """

    def __init__(
        self,
        folder: Path,
        request: JobRequest,
        count: int = 1,
        *,
        command: str = "run",
        links: int = 1,
        **script: Any,
    ) -> None:
        super().__init__(folder)
        self.request, self._count, self._command = request, count, command
        self._links, self.parameters = links, script
        self.locks: Sequence[int] = ()

    @classmethod
    def affinity(cls) -> int:
        """Return that it can be used, also without Slurm: a dry run prints the script."""
        return 1

    @property
    def script(self) -> Path:
        """The path of the batch script, by which the queue knows the jobs."""
        return Path(self.folder) / "job.sh"

    def text(self) -> str:
        """Return the text of the batch script; what Slurm cannot accept is a ConfigError."""
        return self._make_submission_file_text(self._command, uid="")

    def write(self, folders: Sequence[Path]) -> None:
        """Write the batch script and the list of the job folders."""
        (self.folder / "batch").mkdir(parents=True, exist_ok=True)
        if image := self._image():
            travels = offered.environment
            travels.write(Path(image[0]), Path(image[1]) if image[1] else None)
            shutil.copyfile(travels.SHELL, self.folder / "environment.sh")
        self.script.write_text(self.text())
        (self.folder / "tasks").write_bytes(b"".join(os.fsencode(f"{one}\n") for one in folders))

    def queue(self) -> list[str]:
        """Submit the script; return its job id, or those of a chain, of which some may be missing.

        The file `job_id` has them, too. It raises what `sbatch.sbatch` raises.
        """
        ids: list[str] = []
        while len(ids) < self._links:
            command = self._make_submission_command(self.script)
            try:
                answer = sbatch.sbatch(command, self.request, self.locks, ids)
            except LaunchError as error:
                if not ids:
                    raise
                log.warning("launch.chain: %d of %d jobs queued: %s", len(ids), self._links, error)
                break
            ids.append(self._get_job_id_from_submission_command(answer))
            write_atomically(self.folder / "job_id", "".join(f"{each}\n" for each in ids))
        return ids

    def _internal_process_submissions(self, delayed_submissions: Sequence[Any]) -> list[Any]:
        ids, pack = self.queue(), self.request.launch.pack
        return [
            each.function(*each.args, [f"{one}_{number // pack}" for one in ids], self.script)
            for number, each in enumerate(delayed_submissions)
        ]

    def _image(self) -> list[str]:
        """Return the archive of the environment that travels, and the folder of the code copy."""
        if self.request.launch.environment == "shared":
            return []
        output = self.request.output_dir
        travels = offered.environment
        code = travels.code_folder(output, self.parameters.get("pythonpath", ()))
        return [str(travels.image(output)), str(code or "")]

    def _make_submission_file_text(self, command: str, uid: str) -> str:
        given = {"command": command, "image": self._image(), **self.parameters}
        return sbatch_script(self.request, self.folder, self._count, **given)

    def _make_submission_command(self, submission_file_path: Path) -> list[str]:
        return ["sbatch", "--parsable", str(submission_file_path)]

    @staticmethod
    def _get_job_id_from_submission_command(string: bytes | str) -> str:
        return sbatch.job_id(string if isinstance(string, str) else string.decode())


class LocalExecutor(submitit.LocalExecutor):  # type: ignore[misc]
    """Starts the ranks of one job on this machine.

    Args:
        job: The folder that the ranks read; their logs are in its folder `logs`.
        launch: How many ranks, and their time limit.
        code: The code snapshot that they import, or None for the code as it is.
        command: What each rank calls with the folder.
    """

    def __init__(
        self, job: Path, launch: LaunchConfig, code: Snapshot | None, command: str = "run"
    ) -> None:
        super().__init__(job / "logs")
        words = [sys.executable, "-u", "-m", "hpctrain", command, str(job)]
        self._code, self._command = code, shlex.join(words)
        self.update_parameters(
            tasks_per_node=launch.tasks_per_node,
            timeout_min=launch.time_min,
            signal_delay_s=launch.warn_s,
            stderr_to_stdout=True,
        )

    def start(self) -> Popen[bytes]:
        """Start the ranks; return their controller, which passes signals on to them."""
        process: Popen[bytes] = self._submit_command(self._command)._process
        return process

    def _internal_process_submissions(self, delayed_submissions: Sequence[Any]) -> list[Any]:
        return [each.function(*each.args, self.start()) for each in delayed_submissions]

    def _submit_command(self, command: str) -> submitit.LocalJob:
        # Ctrl-C reaches every process of the terminal, and submitit's controller would kill the
        # ranks at once. So the controller inherits that SIGINT is ignored, and we send it SIGTERM
        # instead, with which the ranks can save. Only the main thread can do that.
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
