"""Check a typed config and write its run directory. Nothing is written before all is checked.

Config ── check() ── RunDir (a name, no files) ── freeze() ── config.yaml, run.json, provenance/

A run that died before its first checkpoint starts again at step 0, and that is right. But its
record may show that there was one: an attempt has saved and stopped, or the journal or
progress.json have a step after which the first save must have been over. Such a run must not start
again in silence. One whose code has changed goes on, and says so (`code.trained_code`).

In both cases `train.from_scratch=true` keeps the directory under another name, with its journal,
its uid and so its run in MLflow, and the run starts again as a new one. So a curve in MLflow has
one value for each step, and points that are not yet uploaded can still be.
"""

import errno
import functools
import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from hpctrain.base import extensions
from hpctrain.base.files import yaml_file
from hpctrain.base.files.disk import is_own
from hpctrain.base.names.run_record import Progress
from hpctrain.base.secrets import reference
from hpctrain.config.frozen import digest
from hpctrain.config.schema import CheckpointConfig, Config
from hpctrain.config.validate import validate
from hpctrain.errors import ConfigError, StorageError
from hpctrain.runs import trust, weights_digest
from hpctrain.runs.checkpoints.manifest import OLD, checkpoints
from hpctrain.runs.code import provenance, trained_code
from hpctrain.runs.data_digest import data_digest
from hpctrain.runs.run_dir import RunDir
from hpctrain.tracking.journal import journal_path, last_step
from hpctrain.tracking.store import check_uri

log = logging.getLogger(__name__)


def check(config: Config, world_size: int | None = None) -> RunDir:
    """Check a config, its data sets and its MLflow store; return the run directory.

    The paths are absolute, and the directory need not exist yet. The checkpoint of
    `checkpoint.init_from` and its digest are filled in, and the minutes of `launch.time_min=auto`.
    Without `world_size` the ranks are those in `launch`. A wrong value is a ConfigError, a data set
    that does not fit a DataError, a store that cannot work a TrackingError.
    """
    if config.launch.time_min == "auto":
        extensions.offered("time_limit").pin(config)
    validate(config, world_size)
    weights_digest.pin(config.checkpoint, config.output_dir)
    if config.tracking.enabled and config.tracking.upload:
        _check_uri(str(config.tracking.uri))
    return RunDir.of(config, data_digest(config))


def freeze(
    config: Config, run: RunDir, overrides: Iterable[str] = (), config_dir: str = ""
) -> None:
    """Write the run directory of a checked config, for a training without a submission.

    The overrides and the folder of configs are those of the command.

    A finished run is left as it is, but for a config.yaml that it lacks; with `launch.rerun=all` it
    is archived and starts again. It is
    a StorageError if the directory cannot be written, the checkpoints of the run are gone, or a
    process trains the run, which goes on with the config that it has.
    """
    finished = run.read().state == "finished"
    if finished and config.launch.rerun != "all":
        restore_config(config, run)
        return
    trust.check(run.path, config)
    run.check_unlocked()
    if finished or may_start_again(config, run):
        run.archive()
    words = [*map(reference, overrides)]
    run.freeze(config, provenance=None, overrides=words, config_dir=config_dir)
    with told(run.path):
        provenance.store(run.provenance, provenance.collect())


def restore_config(config: Config, run: RunDir) -> None:
    """Write config.yaml again if it is missing or damaged: a site may delete what is old."""
    known = run.read().config_digests
    with suppress(ConfigError):
        content = yaml_file.content(run.config_file)
        if not known or digest(content) in known:
            return
    if not is_own(run.path):
        return
    run.freeze(config)
    log.warning("%s was missing or damaged, and is written again", run.config_file)


_check_uri = functools.lru_cache(maxsize=16)(check_uri)


@contextmanager
def told(run: Path) -> Iterator[None]:
    """Raise a StorageError for an error of the context that is due to the storage of the run.

    Its directory is gone, or the disk is full. Whatever writes first meets that, and what records
    the failure meets it again.
    """
    try:
        yield
    except Exception as error:
        if problem := _problem(run, error):
            raise StorageError(problem) from error
        raise


def _problem(run: Path, error: Exception) -> str:
    """Return what has happened; "" if the error has nothing to do with the storage of the run."""
    if not (run / "config.yaml").exists():
        return (
            f"{run} is gone: it was deleted or renamed while the run was under way, so nothing "
            "more of it can be saved. Bring it back, and the same command goes on from its last "
            "checkpoint; without it the run starts at step 0"
        )
    if not isinstance(error, OSError):
        return ""
    file = Path(os.fsdecode(error.filename)) if isinstance(error.filename, str | bytes) else None
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        facts = os.statvfs(run)
        return (
            f"{file or run}: cannot be written ({error.strerror}; the file system of the run has "
            f"{facts.f_bavail * facts.f_frsize:,} bytes free). `python -m hpctrain gc` lists what "
            "can be deleted; then the same command goes on from the last checkpoint"
        )
    if file is not None and file.is_relative_to(run):
        return f"{file}: cannot be read or written ({error.strerror})"
    return ""


def refuse_lost_checkpoints(config: Config, run: RunDir) -> None:
    """Raise a StorageError if a run with a saved step has no checkpoint."""
    if step := _saved_step(config.checkpoint, run):
        raise StorageError(
            f"{run.checkpoints} is empty, but the run was at step {step} and has saved: bring its "
            "checkpoints back; or add train.from_scratch=true, which keeps this directory under "
            "another name and starts a new run at step 0"
        )


def may_start_again(config: Config, run: RunDir, folders: Sequence[Path] | None = None) -> bool:
    """Return whether the directory must be archived, so that the run can start at step 0.

    A run that has checkpoints of the code as it is goes on: the same command, typed again after a
    preemption, must not throw away what it has trained. The modules are found as
    `modules.on_disk` does. Checkpoints that are gone without `train.from_scratch`, or a process
    that holds the run, are a StorageError.
    """
    if not config.train.from_scratch:
        refuse_lost_checkpoints(config, run)
        return False
    if not (why := _why_again(config, run, folders)):
        return False
    with run.lock():
        log.warning(
            "train.from_scratch: %s %s: this directory is kept under another name, with its "
            "journal and its run in MLflow, and a new run starts at step 0",
            *(run.path, why),
        )
    return True


def _why_again(config: Config, run: RunDir, folders: Sequence[Path] | None) -> str:
    """Return why a run cannot go on as it was; "" if it can."""
    if step := _saved_step(config.checkpoint, run):
        return f"was at step {step} and has no checkpoint"
    record = run.read()
    if record.attempt.misfit:
        return "has checkpoints of another model"
    if code := trained_code.changes(run, folders):
        return f"has checkpoints of other code ({code})"
    if trained_code.turning_points(record):
        return "has gone on with other code"
    return ""


def _saved_step(checkpoint: CheckpointConfig, run: RunDir) -> int:
    """Return the last known step of a run whose checkpoints are gone; 0 if none are."""
    record = run.read()
    there = checkpoints(run.checkpoints) or [*run.checkpoints.glob(f"*{OLD}")]
    if not record.attempts or record.state == "finished" or there:
        return 0
    stopped = [
        each.step or 0 for each in record.attempts if each.state in ("interrupted", "paused")
    ]
    made = max(Progress.of(run.path).step or 0, last_step(journal_path(run.path)))
    # A save is written before the next step or, in the background, before the next save begins.
    saved_by = (checkpoint.every_steps or made) * 2
    return max([*stopped, made if made > saved_by else 0])
