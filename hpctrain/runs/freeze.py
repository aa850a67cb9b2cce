"""Check a typed config and write its run directory. Nothing is written before all is checked.

Config ── check() ── RunDir (a name, no files) ── freeze() ── config.yaml, run.json, provenance/
"""

import errno
import functools
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from hpctrain.config import evaluation_job
from hpctrain.config.schema import Config
from hpctrain.config.validate import validate
from hpctrain.errors import StorageError
from hpctrain.estimates import node_weights, time_limit
from hpctrain.runs import missing_checkpoints, trust, weights_digest
from hpctrain.runs.code import provenance
from hpctrain.runs.data_digest import data_digest
from hpctrain.runs.run_dir import RunDir
from hpctrain.secrets import reference
from hpctrain.tracking.store import check_uri


def check(config: Config, world_size: int | None = None) -> RunDir:
    """Check a config, its data sets and its MLflow store; return the run directory.

    The paths are absolute, and the directory need not exist yet. The checkpoint of
    `checkpoint.init_from` and its digest are filled in, the minutes of `launch.time_min=auto`, and
    the numbers of `parallel.weights=auto`. Without `world_size` the ranks are those in `launch`. A
    wrong value is a ConfigError, a data set that does not fit a DataError, a store that cannot work
    a TrackingError.
    """
    node_weights.pin(config)
    time_limit.pin(config)
    validate(config, world_size)
    evaluation_job.check(config)
    weights_digest.pin(config.checkpoint, config.output_dir)
    if config.tracking.enabled and config.tracking.upload:
        _check_uri(str(config.tracking.uri))
    return RunDir.of(config, data_digest(config))


def freeze(config: Config, run: RunDir, overrides: Iterable[str] = ()) -> None:
    """Write the run directory of a checked config, for a training without a submission.

    A finished run is left as it is; with `launch.rerun=all` it is archived and starts again. It is
    a StorageError if the directory cannot be written, the checkpoints of the run are gone, or a
    process trains the run, which goes on with the config that it has.
    """
    finished = run.read().state == "finished"
    if finished and config.launch.rerun != "all":
        return
    trust.check(run.path, config)
    run.check_unlocked()
    if finished or missing_checkpoints.may_start_again(config, run):
        run.archive()
    run.freeze(config, provenance=None, overrides=[*map(reference, overrides)])
    with told(run.path):
        provenance.store(run.provenance, provenance.collect())


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
