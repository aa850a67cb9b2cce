"""Train in this process: a config that was just composed, or the frozen one of a run directory.

Heavy imports are inside the functions, so that a wrong config ends before torch is imported.
"""

from __future__ import annotations

import gc
import logging
import shutil
import sys
import time
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from hpctrain.base import offered
from hpctrain.base.errors import ConfigError, DataError, LaunchError, TrackingError
from hpctrain.base.secrets import mask_logging
from hpctrain.base.terminal.terminal import few
from hpctrain.cluster.ranks.ranks import RankInfo
from hpctrain.config.rules import own_loop
from hpctrain.config.sections import RunSections
from hpctrain.runs import trust
from hpctrain.runs.freeze import check, freeze
from hpctrain.runs.run_dir import RunDir

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from hpctrain.base.names.run_record import RunRecord
    from hpctrain.config.schema import Config, TrackingConfig
    from hpctrain.engine.session import Session

log = logging.getLogger(__name__)


def train_here(config: Config, argv: list[str], began: float | None = None) -> tuple[RunDir, int]:
    """Train a composed config with the ranks that were started; return its exit code, too.

    The attempt has `began` with this process, or at a time of `time.monotonic`, if the process has
    done other things before.
    """
    run, ranks = _frozen(config, argv)
    # The other ranks may still see the finished run before rank 0 has archived it.
    again = config.launch.rerun == "all"
    return run, _train_to_the_end(config, run, ranks, again, began)


@contextmanager
def session_here(config: Config, began: float | None = None) -> Iterator[Session]:
    """Open a session of a composed config on the ranks that were started.

    The context is its loop.

    Raises SystemExit at its end if the run was stopped, and at once if it has finished before.
    """
    run, ranks = _frozen(config, [])
    if config.launch.rerun != "all" and _is_finished(run, ranks):
        raise SystemExit(0)
    with _prepared(config, run, ranks):
        from hpctrain.engine.job.fit import session_of

        with session_of(RunSections.of(config), run, ranks, began) as session:
            yield session


def _frozen(config: Config, argv: list[str]) -> tuple[RunDir, RankInfo]:
    """Check a composed config, and write its run directory; return it, and this rank."""
    from hpctrain.config.composing.compose import words

    log_to_stderr()
    ranks = RankInfo.from_env()
    _check_world(config, ranks)
    run = check(config, ranks.world_size)
    # Every rank composes the same config, and one of them writes it.
    if ranks.is_main:
        _check_queue(run, ranks)
        freeze(config, run, *(words(argv) if argv else ()))
    return run, ranks


def train_frozen(
    path: Path,
    until: int | None = None,
    ranks: RankInfo | None = None,
    change: Callable[[Config], None] = lambda config: None,
) -> int:
    """Train the frozen config of a run directory with the ranks that were started.

    With `until`, the same on all ranks, the run pauses at this global step, unless it ends before:
    its state is "paused" then, and its result has the metrics of the step. It goes on as if it had
    not paused. The ranks of a worker are given. `change` changes the config for this process alone,
    as a debugger needs it. Return the exit code. A data set other than the run was submitted with
    is a DataError.
    """
    from hpctrain.config.frozen import executed, load
    from hpctrain.config.validate import validate
    from hpctrain.runs.state.failure import recorded

    run = RunDir.open(path)
    log_to_stderr()
    ranks = replace(ranks or RankInfo.from_env(), until=until)
    began = time.monotonic() if ranks.worker else None
    with recorded(run.path, ranks.attempt_key, ranks.rank):
        config = load(run.config_file)
        trust.check(run.path, executed(config), run.code_copy)
        _check_world(config, ranks)
        validate(config, ranks.world_size)
        # The check opens every shard, so only one rank does it; if it fails, the others end too.
        if ranks.is_main:
            _say_what_changed(run)
            _check_queue(run, ranks)
            try:
                digest = check(config, ranks.world_size).data_digest
            except ConfigError as error:  # the config fitted when the run was submitted
                raise DataError(
                    f"data.path={config.data.path}: another data set than when this run was asked "
                    f"for ({error})"
                ) from error
            if digest != run.read().data_digest:
                raise DataError(
                    f"data.path={config.data.path}: another data set ({digest}) than when this "
                    "run was asked for; ask for it again, and it will be another run"
                )
        change(config)
        return _train_to_the_end(config, run, ranks, began=began)


def _train_to_the_end(
    config: Config, run: RunDir, ranks: RankInfo, again: bool = False, began: float | None = None
) -> int:
    own_loop.check_callable(config)
    if ranks.until is not None and run.read().paused_at == ranks.until:
        if ranks.is_main:
            print(f"{run.name} is paused at step {ranks.until} already")
        return 0
    if not again and _is_finished(run, ranks):
        if ranks.is_main:
            _show_finished(config.tracking, run, config.metric)
        return 0
    with _prepared(config, run, ranks):
        from hpctrain.engine.job.fit import train

        code = train(RunSections.of(config), run, ranks, began)
    if code == 0 and ranks.is_main and run.read().paused_at is None:
        offered.summary.show(run, config.metric, config.tracking)
    return code


def _is_finished(run: RunDir, ranks: RankInfo) -> bool:
    """Return whether a run has finished before, and say so."""
    finished = run.read().state == "finished"
    if finished and ranks.is_main:
        print(f"{run.name} is finished already; change a value (seed=1) for another run")
    return finished


def _show_finished(tracking: TrackingConfig, run: RunDir, metric: str) -> None:
    """Show a run that has finished before; upload what its uploader has left, if it was killed."""
    from hpctrain.runs.code import trained_code
    from hpctrain.tracking.meta import left_behind

    if changed := trained_code.changes(run):
        log.warning(
            "%s has finished with other code: %s. launch.rerun=all trains it again, and keeps this "
            "directory under another name; name=OTHER makes another run",
            *(run.name, changed),
        )

    if tracking.enabled and tracking.upload and left_behind(run.path):
        try:
            offered.sync([run.path])
        except TrackingError as error:
            log.warning("%s", error)
    offered.summary.show(run, metric, tracking)


@contextmanager
def _prepared(config: Config, run: RunDir, ranks: RankInfo) -> Iterator[None]:
    """Prepare this process for an attempt, and import torch; the observer sees the context."""
    from hpctrain.cluster.ranks import flight_recorder, leaving
    from hpctrain.cluster.ranks.variables import export
    from hpctrain.engine.faults.observed import observed
    from hpctrain.engine.job import compile_cache
    from hpctrain.runs.run_dir import told
    from hpctrain.runs.terminal_log import kept

    tracking = config.tracking
    # The other ranks keep a log once rank 0 has certainly made the folder.
    with kept(run.logs, ranks) if ranks.is_main else nullcontext(), told(run.path):
        if ranks.is_main:
            log.info("%s: starting; importing torch takes some seconds", run.path)
        # What torch and its libraries read when they are imported, or first used.
        sections = config.network, config.train, config.site.env
        exported = export(*sections, one_node=ranks.one_node)
        home = Path(ranks.worker or run.path)
        flight_recorder.prepare(home / "logs", ranks.rank)
        if ranks.world_size > 1:
            leaving.write_no_core_dump()
        if exported and ranks.is_main:
            log.info("exported variables are kept: %s", ", ".join(exported))
        compile_cache.use(home)
        if ranks.is_main and tracking.enabled and tracking.upload:
            from hpctrain.tracking.store import check_store

            check_store(str(tracking.uri), tracking.experiment)
        with observed(config.hang, run.logs, ranks, config.parallel.timeout_s):
            # Collections take a third of the time of the import: torch makes many objects and
            # drops few. Later collections leave them out, but not what a training before has left.
            if "hpctrain.engine.job.fit" not in sys.modules:
                gc.disable()
                import hpctrain.engine.job.fit  # noqa: F401

                gc.freeze()
                gc.enable()
            yield


def _check_world(config: Config, ranks: RankInfo) -> None:
    """Check that all ranks were started, before one of them waits for the others."""
    if idle := ranks.idle_tasks():
        raise ConfigError(
            f"this job has {idle + 1} tasks (SLURM_NTASKS), but only this process was started: put "
            "srun in front (srun --overlap in a shell that srun has started), or set "
            "HPCTRAIN_LAUNCHER=single to train with one process here"
        )
    asked, launch = config.asked_world_sizes, config.launch
    # With plain `torchrun` or the sbatch template, `launch` keeps its default of one rank.
    if list(asked) != [1] and ranks.world_size not in asked:
        several = f" to {asked[-1]}" if len(asked) > 1 else ""
        raise ConfigError(
            f"launch.nodes={launch.nodes} x launch.tasks_per_node="
            f"{launch.tasks_per_node} = {asked[0]}{several} ranks, but {ranks.world_size} "
            f"{'was' if ranks.world_size == 1 else 'were'} started ({ranks.launcher}): "
            "start them with -m or torchrun, ask sbatch or srun for as many (--nodes, "
            "--ntasks-per-node), or leave launch.* out"
        )


def _say_what_changed(run: RunDir) -> None:
    """Warn if Python or its packages are not those with which the run was asked for."""
    from hpctrain.runs.code import provenance

    recorded = run.read().provenance  # of its sweep, until the run starts
    if changed := provenance.changes(Path(recorded) if recorded else run.provenance):
        log.warning(
            "Python or its packages have changed since this run was asked for: %s", few(changed, 6)
        )


def _check_queue(run: RunDir, ranks: RankInfo) -> None:
    """Check that no job of Slurm has the run, before a process outside of Slurm trains it."""
    record = run.read()
    has_job = record.submission or record.attempt.job_id
    ended = record.state in ("finished", "paused")
    # Else this is the job of the run, or a sweep, which asked.
    outside = ranks.launcher in ("single", "torchrun")
    if has_job and not ended and outside and shutil.which("squeue"):
        _refuse_job(run, record, ranks)


def _refuse_job(run: RunDir, record: RunRecord, ranks: RankInfo) -> None:
    from hpctrain.cluster.slurm import queue
    from hpctrain.runs.state.shared_job import job_of

    try:
        job = job_of(run.path, record, queue.queue_of([record]))
    except queue.UnreachableError as error:
        log.warning("%s: whether a job of this run waits in the queue is not known", error)
        return
    if job is None or job.is_ending or job.id == ranks.job_id:
        return
    waits = f"waits in the queue ({job.reason})" if job.state == "PENDING" else f"is {job.state}"
    raise LaunchError(
        f"{run.path}: job {job.id} of this run {waits}, and goes on with the run. To train it here "
        f"instead, take the job out of the queue: `python -m hpctrain cancel {run.path}`; then "
        "give this command again"
    )


def log_to_stderr() -> None:
    """Let the log lines of this process go to stderr, with secrets masked."""
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S", stream=sys.stderr
    )
    # What the progress bar shows is for the log file of the run alone.
    logging.getLogger().handlers[0].addFilter(lambda record: not hasattr(record, "on_bar"))
    mask_logging()
