"""Submit any importable function as the ranks of a job.

submit(config, f, args, kwargs) ── call.json, our script ── sbatch ── FunctionJob
each rank: python -m hpctrain call FOLDER ── results/RANK.json ── job.results()
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from hpctrain.base.files.disk import write_atomically
from hpctrain.cluster.slurm import queue, sbatch
from hpctrain.cluster.slurm.script import sbatch_script
from hpctrain.config.composing.compose_call import composed
from hpctrain.config.frozen import from_omegaconf
from hpctrain.config.job_request import JobRequest
from hpctrain.config.schema import Config
from hpctrain.config.validate import validate_job
from hpctrain.errors import ConfigError, LaunchError, StorageError
from hpctrain.launch import local_runs
from hpctrain.launch.jobs import FailedError
from hpctrain.launch.logged_jobs import LocalLoggedJob, LoggedJob, SlurmLoggedJob
from hpctrain.launch.sweeps.submit_lock import submit_lock
from hpctrain.runs.code import snapshot
from hpctrain.runs.function_call import Call, read_results

_SECTIONS = ("launch", "site", "network", "name", "output_dir")


def compose(
    overrides: Sequence[str], config_dir: str | os.PathLike[str] | None = None
) -> tuple[Config, bool]:
    """Return a config with these overrides of `launch` and `site`, and whether to run here.

    That is `hydra/launcher=submitit_local`. A wrong override, or one of a training, is a
    ConfigError.
    """
    for text in overrides:
        key = re.split(r"[.=@]", str(text).lstrip("+~"), maxsplit=1)[0]
        if key not in (*_SECTIONS, "hydra/launcher", "hydra"):
            raise ConfigError(f"{text}: for a function there are {', '.join(_SECTIONS)}")
    with composed(overrides, config_dir) as call:
        if len(call.runs) != 1:
            raise ConfigError(f"{' '.join(overrides)}: {len(call.runs)} jobs; give single values")
        node, here = call.composer(call.runs[0]), call.local
        config = from_omegaconf(OmegaConf.masked_copy(node, list(_SECTIONS)))
        config.data.path = config.output_dir
    validate_job(config, _SECTIONS)
    if len(config.launch.node_numbers) > 1:
        raise ConfigError(f"launch.nodes={config.launch.nodes}: a function needs one number")
    if config.launch.time_min == "auto":
        raise ConfigError("launch.time_min=auto: a function has no measured run; give minutes")
    if config.launch.pack > 1:
        raise ConfigError(f"launch.pack={config.launch.pack}: a function is a job of its own")
    if config.launch.dry_run:
        raise ConfigError("launch.dry_run=true: there is no dry run of a function")
    return config, here


def submit(
    config: Config,
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    here: bool = False,
) -> FunctionJob | LocalFunctionJob:
    """Write the call and the script, and submit it; without a cluster, or `here`, start it here.

    What cannot be written of the call is a ConfigError, and nothing was queued; a refusal of the
    scheduler is a LaunchError.
    """
    call = Call.of(function, args, kwargs)
    if config.name == Config().name:
        config.name = re.sub(r"[^A-Za-z0-9]", "-", call.name).strip("-")[:64]
    stamp = datetime.now().strftime("%Y-%m-%d_%H-%M-%S_%f")
    folder = Path(config.output_dir) / "functions" / f"{stamp}-{config.name}"
    code = snapshot.take(config.launch, config.output_dir, config.data.path)
    ranks = config.asked_world_sizes[0]
    cluster = sbatch.available() and not here
    if not cluster:
        local_runs.check(config)
    job = JobRequest.of(config)
    script = sbatch_script(
        job, folder, 1, pythonpath=code.pythonpath if code else (), command="call"
    )
    if cluster:
        with suppress(queue.UnreachableError):  # busy: the submission waits longer
            sbatch.expected_start(script, job)
    try:
        with submit_lock([Path(config.output_dir)]) as locks:
            for name in ("logs", "results", "batch"):
                (folder / name).mkdir(parents=True)
            if code:
                code.write()
            call.write(folder, code.digest if code else None)
            if not cluster:
                command = [sys.executable, "-u", "-m", "hpctrain", "call", str(folder)]
                job_id, process = local_runs.start(config.launch, folder / "logs", code, command)
                return LocalFunctionJob(folder, job_id, ranks, process)
            (folder / "tasks").write_bytes(os.fsencode(f"{folder}\n"))
            (folder / "job.sh").write_text(script)
            array = sbatch.sbatch(folder / "job.sh", job, locks)
            write_atomically(folder / "job_id", array + "\n")
    except queue.UnreachableError:
        raise  # the job may be queued
    except LaunchError:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    except OSError as error:
        raise StorageError(f"{folder}: cannot be written ({error.strerror})") from error
    return FunctionJob(folder, f"{array}_0", ranks)


_OVER = "launch.time_min was over; a function has no checkpoint, and is not begun again"


class _FunctionJob(LoggedJob):
    """What the jobs of functions have in common."""

    _folder: Path
    _ranks: int

    def results(self) -> list[Any]:
        """Wait for the end of the job and return the results of all ranks, in their order."""
        self.wait()  # type: ignore[attr-defined]
        found = read_results(self._folder, self._ranks)
        # A failure of one rank makes others fail later.
        failed = [(each["time"], rank, each["error"]) for rank, each in found if "error" in each]
        if failed:
            _, rank, trace = min(failed)
            raise FailedError(f"{self._folder.name}, rank {rank}:\n{trace}")
        if missing := set(range(self._ranks)) - {rank for rank, _ in found}:
            state = self.state  # type: ignore[attr-defined]
            why = f" ({_OVER})" if state == "TIMEOUT" else ""
            raise FailedError(
                f"{self._folder.name}: rank {min(missing)} has left no result, the job is {state}"
                f"{why}: see {self._paths.folder}"
            )
        return [each["value"] for _, each in found]

    def answers(self) -> dict[int, Any]:
        """Wait for the end of the job and return the results of those ranks that have left one."""
        self.wait()  # type: ignore[attr-defined]
        found = read_results(self._folder, self._ranks)
        return {rank: each["value"] for rank, each in found if "value" in each}

    def submission(self) -> Any:
        """Return the call: module, name, args and kwargs."""
        return Call.read(self._folder)

    def _ended(self) -> str:
        there = read_results(self._folder, self._ranks)
        return "COMPLETED" if len(there) == self._ranks else ""


class FunctionJob(_FunctionJob, SlurmLoggedJob):
    """A function that was submitted to Slurm; its job id is `ARRAYJOB_0`."""

    def __init__(self, folder: Path, job_id: str, ranks: int) -> None:
        self._folder, self._ranks = folder, ranks
        super().__init__(folder / "logs", job_id, folder / "job.sh")


class LocalFunctionJob(_FunctionJob, LocalLoggedJob):
    """A function that runs here."""

    def __init__(self, folder: Path, job_id: str, ranks: int, process: Any) -> None:
        self._folder, self._ranks = folder, ranks
        super().__init__(folder / "logs", job_id, process)
