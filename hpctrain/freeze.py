"""From a typed config to a frozen run directory: everything is checked before anything is written.

Config ── check() ── RunDir (named, not yet there) ── freeze() ── config.yaml, run.json, provenance/
"""

from __future__ import annotations

import functools
from pathlib import Path

from hpctrain import provenance
from hpctrain.config import Config
from hpctrain.data.index import FILE as INDEX_FILE
from hpctrain.data.index import Index
from hpctrain.errors import ConfigError, DataError
from hpctrain.rundir import RunDir
from hpctrain.tracking.store import check_uri
from hpctrain.validate import validate


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
    return RunDir.of(config, _data_digest(config, world_size))


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


def _data_digest(config: Config, world_size: int | None) -> str:
    validate(config, world_size)
    if config.tracking.enabled and config.tracking.upload:
        _check_uri(str(config.tracking.uri))
    folder = Path(config.data.path)
    try:
        index = _index(folder, _stamp(folder))
        count = index.split(config.data.train_split).count
        if config.data.val_split is not None:
            index.split(config.data.val_split)
    except DataError as error:
        hint = "" if folder.exists() else "; `python -m data_prep --help` shows how to write one"
        raise DataError(f"data.path: {error}{hint}") from error
    if config.data.tail == "drop" and config.train.global_batch_size > count:
        raise ConfigError(
            f"train.global_batch_size={config.train.global_batch_size}, but the split "
            f"{config.data.train_split!r} of {folder} has {count} samples: at most that many, "
            "or data.tail=pad"
        )
    return index.digest


_check_uri = functools.lru_cache(maxsize=16)(check_uri)


@functools.lru_cache(maxsize=16)
def _index(folder: Path, stamp: object) -> Index:
    """The checked index of a data set; the runs of a sweep mostly share one."""
    index = Index.load(folder)
    index.check(folder)
    return index


def _stamp(folder: Path) -> object:
    try:
        facts = (folder / INDEX_FILE).stat()
    except OSError:
        return None
    return facts.st_mtime_ns, facts.st_size, facts.st_ino
