"""Compose the runs of a Python call, without Hydra's main function and its global state.

    "optimizer.lr=1e-3,3e-3" ── Hydra's basic sweeper ── lists of overrides ── Composer ── Configs

So it works in a program or a notebook that uses Hydra itself.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra._internal.utils import create_config_search_path
from hydra.core.config_search_path import SearchPathQuery
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.utils import setup_globals
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf.errors import OmegaConfBaseException

from hpctrain.base.errors import ConfigError
from hpctrain.base.files.disk import expanded
from hpctrain.base.files.yaml_file import conf_dir
from hpctrain.config.composing.compose import extending, our_launchers, quoted, store_schema
from hpctrain.config.composing.compose_sweep import Composer
from hpctrain.config.explain import explain
from hpctrain.config.frozen import known_keys
from hpctrain.config.launcher_keys import is_local


@dataclass(frozen=True)
class _Call:
    """The runs that the overrides of a call describe."""

    composer: Composer
    runs: list[list[str]]  # the overrides of each run
    folder: Path  # the value of `hydra.sweep.dir`
    local: bool  # `hydra/launcher=submitit_local`: run on this machine


@contextmanager
def composed(
    overrides: Sequence[str], config_dir: str | os.PathLike[str] | None
) -> Iterator[_Call]:
    """Yield the runs of a call; `composer` works inside the `with` block.

    Values with commas are expanded as by `-m`; a wrong override is a ConfigError.
    """
    for text in overrides:
        if not isinstance(text, str) or text.startswith("-"):
            is_folder = isinstance(text, str) and text.startswith(("--config-dir", "-cd"))
            hint = "; config_dir=FOLDER is an argument of this function" if is_folder else ""
            raise ConfigError(
                f"{text!r}: an override is text of the form 'KEY=VALUE'; flags of the command line "
                f"are not used here{hint}"
            )
    try:
        with our_launchers():
            yield _call([quoted(extending(text)) for text in overrides], config_dir)
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(explain(error, known_keys())) from error


def _call(overrides: list[str], config_dir: str | os.PathLike[str] | None) -> _Call:
    setup_globals()  # the resolver `now`
    store_schema()
    path = create_config_search_path(str(conf_dir()))
    if config_dir is not None:
        folder = os.path.abspath(expanded(str(config_dir), "config_dir"))
        if not os.path.isdir(folder):
            raise ConfigError(f"config_dir={config_dir}: no such folder")
        path.prepend("command-line", f"file://{folder}", SearchPathQuery(provider="schema"))
    loader = ConfigLoaderImpl(path)
    master = loader.load_configuration("config", overrides, run_mode=RunMode.MULTIRUN)
    sweeper = master.hydra.sweeper
    if sweeper._target_ != _SWEEPER or sweeper.max_batch_size is not None:
        raise ConfigError(
            "hydra/sweeper and hydra.sweeper.max_batch_size belong to the command line "
            "(python -m hpctrain -m); here all runs of a grid are submitted together"
        )
    params = [quoted(f"{key}={value}") for key, value in (sweeper.params or {}).items()]
    parser = OverridesParser.create(config_loader=loader)
    parsed = parser.parse_overrides([*params, *master.hydra.overrides.task])
    (runs,) = BasicSweeper.split_arguments(parsed, None)
    here = is_local(master.hydra.launcher)
    return _Call(Composer(loader, master), runs, Path(str(master.hydra.sweep.dir)), here)


_SWEEPER = "hydra_plugins.hpctrain_launcher.HpctrainSweeper"
