"""Submit any importable function as the ranks of a job.

submit(config, calls) ── call.json ── SlurmExecutor ── FunctionJob, one for each call
each rank: python -m hpctrain call FOLDER ── results/RANK.json ── job.results()
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from subprocess import Popen
from typing import Any

from omegaconf import OmegaConf

from hpctrain.base import offered
from hpctrain.base.errors import ConfigError, LaunchError, StorageError
from hpctrain.cluster.slurm import queue, sbatch
from hpctrain.cluster.slurm.script import JobOrder
from hpctrain.config import launcher_keys
from hpctrain.config.composing.compose_sweep import composed
from hpctrain.config.frozen import from_omegaconf
from hpctrain.config.job_request import JobRequest
from hpctrain.config.schema import Config
from hpctrain.config.validate import validate_job
from hpctrain.launch.executors import LocalExecutor, SlurmExecutor
from hpctrain.launch.functions.function_call import Call, read_results
from hpctrain.launch.jobs import FailedError
from hpctrain.launch.logged_jobs import LocalLoggedJob, LoggedJob, SlurmLoggedJob
from hpctrain.launch.sweeps.before_queueing import check_here
from hpctrain.launch.sweeps.submission import submit_lock
from hpctrain.runs.code import snapshot

_SECTIONS = ("launch", "site", "network", "name", "output_dir")


def compose(
    overrides: Sequence[str],
    config_dir: str | os.PathLike[str] | None = None,
    parameters: Mapping[str, Any] | None = None,
) -> tuple[Config, bool]:
    """Return a config with these overrides of `launch` and `site`, and whether to run here.

    That is `hydra/launcher=submitit_local`. A wrong override, or one of a training, is a
    ConfigError. `parameters` are submitit's, by its names, which have precedence.
    """
    for text in overrides:
        key = re.split(r"[.=@]", str(text).lstrip("+~"), maxsplit=1)[0]
        if key not in (*_SECTIONS, "hydra/launcher", "hydra"):
            raise ConfigError(f"{text}: for a function there are {', '.join(_SECTIONS)}")
    with composed(overrides, config_dir) as call:
        if len(call.runs) != 1:
            raise ConfigError(f"{' '.join(overrides)}: {len(call.runs)} jobs; give single values")
        node, here = call.composer(call.runs[0]), call.local
        for key, value, _ in launcher_keys.read(parameters or {}):
            if key:
                OmegaConf.update(node, key, value, force_add=True)
        config = from_omegaconf(OmegaConf.masked_copy(node, list(_SECTIONS)))
        config.data.path = config.output_dir
    validate_job(config, _SECTIONS)
    if len(config.launch.node_numbers) > 1:
        raise ConfigError(f"launch.nodes={config.launch.nodes}: a function needs one number")
    if config.launch.pack > 1:
        raise ConfigError(f"launch.pack={config.launch.pack}: a function is a job of its own")
    if config.launch.dry_run:
        raise ConfigError("launch.dry_run=true: there is no dry run of a function")
    return config, here


def submit(
    config: Config, calls: Sequence[Call], here: bool = False
) -> list[FunctionJob | LocalFunctionJob]:
    """Write the calls and submit them as one array; without a cluster, or `here`, start them here.

    The script lies beside the first call. A refusal of the scheduler is a LaunchError, and nothing
    is left.
    """
    if config.name == Config().name:
        config.name = re.sub(r"[^A-Za-z0-9]", "-", calls[0].name).strip("-")[:64]
    stamp = datetime.now().strftime("%Y-%m-%d_%H-%M-%S_%f")
    first = Path(config.output_dir) / "functions" / f"{stamp}-{config.name}"
    others = [first.with_name(f"{first.name}-{number}") for number in range(1, len(calls))]
    folders, ranks = [first, *others], config.asked_world_sizes[0]
    code = snapshot.take(config.launch, config.output_dir, config.data.path)
    cluster, request = sbatch.available() and not here, JobRequest.of(config)
    if not cluster:
        check_here(request)
    executor = SlurmExecutor(
        first,
        request,
        len(calls),
        command="call",
        pythonpath=code.pythonpath if code else (),
        order=JobOrder(config.launch.max_running if others else None),
    )
    script = executor.text()
    if cluster:
        with suppress(queue.UnreachableError):  # busy: the submission waits longer
            sbatch.expected_start(script, executor.request)
        if config.launch.environment == "image":  # a minute the first time: before the lock
            environment = offered.environment
            environment.write(environment.image(config.output_dir), None)
    try:
        with submit_lock([Path(config.output_dir)]) as executor.locks:
            if code:
                code.write()
            for folder, call in zip(folders, calls, strict=True):
                for name in ("logs", "results"):
                    (folder / name).mkdir(parents=True)
                call.write(folder, code.digest if code else None)
            if cluster:
                executor.write(folders)
                return list(executor.map_array(FunctionJob, folders, [ranks] * len(calls)))
            return [
                LocalExecutor(each, config.launch, code, "call").submit(
                    LocalFunctionJob, each, ranks
                )
                for each in folders
            ]
    except queue.UnreachableError:
        raise  # the job may be queued
    except LaunchError:
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)
        raise
    except OSError as error:
        raise StorageError(f"{first}: cannot be written ({error.strerror})") from error


_OVER = "launch.time_min was over; a function has no checkpoint, and is not begun again"


class _FunctionJob(LoggedJob):
    """What the jobs of functions have in common."""

    _folder: Path
    _ranks: int

    def results(self) -> list[Any]:
        """Wait for the end of the job and return the results of all ranks, in their order."""
        self.wait()
        found = read_results(self._folder, self._ranks)
        # A failure of one rank makes others fail later.
        failed = [(each["time"], rank, each["error"]) for rank, each in found if "error" in each]
        if failed:
            _, rank, trace = min(failed)
            raise FailedError(f"{self._folder.name}, rank {rank}:\n{trace}")
        if missing := set(range(self._ranks)) - {rank for rank, _ in found}:
            state = self.state
            why = f" ({_OVER})" if state == "TIMEOUT" else ""
            raise FailedError(
                f"{self._folder.name}: rank {min(missing)} has left no result, the job is {state}"
                f"{why}: see {self._paths.folder}"
            )
        return [each["value"] for _, each in found]

    def answers(self) -> dict[int, Any]:
        """Wait for the end of the job and return the results of those ranks that have left one."""
        self.wait()
        found = read_results(self._folder, self._ranks)
        return {rank: each["value"] for rank, each in found if "value" in each}

    def submission(self) -> Any:
        """Return the call: module, name, args and kwargs."""
        return Call.read(self._folder)

    def _ended(self) -> str:
        there = read_results(self._folder, self._ranks)
        return "COMPLETED" if len(there) == self._ranks else ""


class FunctionJob(_FunctionJob, SlurmLoggedJob):
    """A function that was submitted to Slurm; its job id is `ARRAYJOB_TASK`."""

    def __init__(self, folder: Path, ranks: int, ids: Sequence[str], script: Path) -> None:
        self._folder, self._ranks = folder, ranks
        super().__init__(folder / "logs", ids, script)


class LocalFunctionJob(_FunctionJob, LocalLoggedJob):
    """A function that runs here."""

    def __init__(self, folder: Path, ranks: int, process: Popen[bytes]) -> None:
        self._folder, self._ranks = folder, ranks
        super().__init__(folder / "logs", process)
