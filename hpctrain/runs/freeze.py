"""Check a typed config and write its run directory. Nothing is written before all is checked.

Config ── check() ── RunDir (a name, no files) ── freeze() ── config.yaml, run.json, provenance/
"""

import functools
from collections.abc import Iterable

from hpctrain.config import evaluation_job
from hpctrain.config.schema import Config
from hpctrain.config.validate import validate
from hpctrain.estimates import node_weights, time_limit
from hpctrain.runs import missing_checkpoints, trust, weights_digest
from hpctrain.runs.code import provenance
from hpctrain.runs.data_digest import data_digest
from hpctrain.runs.run_dir import RunDir
from hpctrain.runs.storage_failure import told
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
