"""From a typed config to a frozen run directory: everything is checked before anything is written.

Config ── check() ── RunDir (named, not yet there) ── freeze() ── config.yaml, run.json, provenance/
"""

from __future__ import annotations

import functools

from hpctrain.config.schema import Config
from hpctrain.config.validate import validate
from hpctrain.runs import provenance
from hpctrain.runs.data_digest import data_digest
from hpctrain.runs.run_dir import RunDir
from hpctrain.tracking.store import check_uri


def check(config: Config, world_size: int | None = None) -> RunDir:
    """Validate the config and the data set it names, by their metadata only.

    Args:
        config: the typed config, paths absolute.
        world_size: ranks that run it; None: those that `launch` asks for.

    Returns:
        The run's directory, which need not exist yet.

    Raises:
        ConfigError: a value is wrong.
        DataError: the data set is missing, incomplete or of another format.
        TrackingError: the store cannot work.
    """
    validate(config, world_size)
    if config.tracking.enabled and config.tracking.upload:
        _check_uri(str(config.tracking.uri))
    return RunDir.of(config, data_digest(config))


def freeze(config: Config, run: RunDir) -> None:
    """Write the run directory of a checked config, for a training here and now.

    With `launch.rerun=all` a finished run is kept under another name and done again.

    Raises:
        StorageError: it cannot be written.
    """
    if run.read().get("state") == "finished":
        if config.launch.rerun != "all":
            return
        run.archive()
    run.freeze(config)
    provenance.store(run.provenance, provenance.collect())


_check_uri = functools.lru_cache(maxsize=16)(check_uri)
