"""Check a typed config and write its run directory. Nothing is written before all is checked.

Config ── check() ── RunDir (a name, no files) ── freeze() ── config.yaml, run.json, provenance/
"""

import functools
import logging
from collections.abc import Iterable
from contextlib import suppress

from hpctrain.base.errors import ConfigError
from hpctrain.base.files import yaml_file
from hpctrain.base.files.disk import is_own
from hpctrain.base.secrets import reference
from hpctrain.config.frozen import digest, dump, executed
from hpctrain.config.identity import run_path
from hpctrain.config.schema import Config, TrackingConfig
from hpctrain.config.validate import validate
from hpctrain.runs import trust
from hpctrain.runs.code import provenance
from hpctrain.runs.data_digest import data_digest
from hpctrain.runs.run_dir import RunDir, told
from hpctrain.runs.start_again import may_start_again
from hpctrain.tracking import store

log = logging.getLogger(__name__)


def check(config: Config, world_size: int | None = None) -> RunDir:
    """Check a config, its data sets and its MLflow store; return the run directory.

    The paths are absolute, and the directory need not exist yet. The checkpoint of
    `checkpoint.init_from` and its digest are filled in. Without `world_size` the ranks are those in
    `launch`. A wrong value is a ConfigError, a data set that does not fit a DataError, a store that
    cannot work a TrackingError.
    """
    validate(config, world_size)
    if config.checkpoint.init_from is not None:
        from hpctrain.runs.chosen_checkpoint import pin

        pin(config.checkpoint, config.output_dir)
    if config.tracking.enabled and config.tracking.upload:
        _check_uri(str(config.tracking.uri))
    digest = data_digest(config.data, config.train, config.task)
    return RunDir(run_path(config, digest), digest)


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
    if run.path.exists():  # else nothing is there that could be lost, or be somebody else's
        trust.check(run.path, executed(config))
        run.check_unlocked()
        if finished or may_start_again(run, config.train, config.checkpoint):
            run.archive()
    words = [*map(reference, overrides)]
    run.freeze(dump(config), provenance=None, overrides=words, config_dir=config_dir)
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
    run.freeze(dump(config))
    log.warning("%s was missing or damaged, and is written again", run.config_file)


def check_stores(runs: Iterable[TrackingConfig]) -> None:
    """Check the stores to which runs upload while they train."""
    uploaded = (each for each in runs if each.enabled and each.upload)
    for uri, experiment in dict.fromkeys((str(each.uri), each.experiment) for each in uploaded):
        if store.is_server(uri) or store.sqlite_path(uri).exists():
            store.check_store(uri, experiment)


_check_uri = functools.lru_cache(maxsize=16)(store.check_uri)
