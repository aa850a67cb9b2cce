"""Compose the many configs of a sweep, with Hydra's result but much faster.

`compose` composes the config of one command line. Hydra takes 25 to 70 ms per config, nearly all of
it for the defaults list and its files. These depend only on the choices (`model=mlp`,
`experiment=digits`) and not on the values (`optimizer.lr=1e-3`). So each set of choices is composed
once. Then Hydra's own function writes the values into it, in the order of the command line.

A call from Python has no command line, and leaves Hydra's main function and global state alone:

    "optimizer.lr=1e-3,3e-3" ── Hydra's basic sweeper ── lists of overrides ── Composer ── Configs
"""

import functools
import os
import pickle
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra._internal.defaults_list import Overrides
from hydra._internal.utils import create_config_search_path
from hydra.core.config_search_path import SearchPathQuery
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.core.utils import setup_globals
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from hpctrain.base.errors import ConfigError
from hpctrain.base.files.disk import expanded
from hpctrain.base.files.yaml_file import conf_dir
from hpctrain.config import launcher_keys
from hpctrain.config.composing.compose import as_asked, extending, our_files, quoted
from hpctrain.config.explain import explain
from hpctrain.config.frozen import from_omegaconf, known_keys
from hpctrain.config.schema import Config


class Composer:
    """Composes one config after another; `master` is the config of the sweep itself."""

    def __init__(self, loader: ConfigLoaderImpl, master: DictConfig) -> None:
        self._loader, self._master = loader, master
        folders = master.hydra.runtime.config_sources
        self.config_dir = next((f.path for f in folders if f.provider == "command-line"), "")
        self._bases: dict[tuple[str, ...], bytes] = {}  # pickled, which is the fastest copy
        self.notes: dict[str, None] = {}  # lines for the user, in their order
        self._read: dict[str, str] = {}  # of the keys of `hydra.launcher`, by our key: the line
        self._parse = functools.cache(self._parse_one)

    def __call__(self, overrides: list[str]) -> DictConfig:
        """Return the config of these overrides, without its `hydra` section.

        Hydra raises its errors and OmegaConf's.
        """
        values = [parsed for text in overrides if (parsed := self._parse(text)) is not None]
        choices = tuple(text for text in overrides if self._parse(text) is None)
        if choices not in self._bases:
            self._bases[choices] = pickle.dumps(self._compose(list(choices)))
        for key in {value.key_or_group for value in values} & self._read.keys():
            line = self._read.pop(key)
            self.notes.pop(line, None)
            self.notes[f"{line.partition(' is ')[0]} has no effect: {key} is given, too"] = None
        config: DictConfig = pickle.loads(self._bases[choices])
        ConfigLoaderImpl._apply_overrides_to_config(values, config)
        return config

    def is_choice(self, override: str) -> bool:
        """Return whether an override chooses a file, such as `model=unet`, or is one of Hydra."""
        return self._parse(override) is None

    def typed(self, overrides: list[str]) -> Config:
        """Return the typed config; a wrong key, value or choice is a ConfigError."""
        try:
            return as_asked(from_omegaconf(self(overrides)))
        except (HydraException, OmegaConfBaseException) as error:
            raise ConfigError(explain(error, known_keys())) from error

    def _compose(self, choices: list[str]) -> DictConfig:
        config = self._loader.load_sweep_config(self._master, choices)
        launcher: Any = OmegaConf.to_container(config.hydra.launcher, resolve=True)
        if launcher.get("name") == config.hydra.job.name:  # the default of submitit's launcher
            launcher["name"] = None
        self._check_params(config, choices)
        # OmegaConf.masked_copy would forget the types of the keys at the top.
        del config.__dict__["_content"]["hydra"]
        for key, value, note in launcher_keys.read(launcher):
            self.notes[note] = None
            if key:
                self._read[key] = note
                try:
                    OmegaConf.update(config, key, value, force_add=True)
                except OmegaConfBaseException as error:
                    asked = note.partition(" is read as ")[0]
                    raise ConfigError(f"{asked} ({explain(error, ())})") from error
        if launcher_keys.is_local(launcher) != launcher_keys.is_local(self._master.hydra.launcher):
            raise ConfigError(
                f"{' '.join(choices)}: this run has another hydra/launcher than the sweep; give "
                "hydra/launcher=submitit_local or submitit_slurm on the command line"
            )
        OmegaConf.set_struct(config, True)
        return config

    def _check_params(self, config: DictConfig, choices: list[str]) -> None:
        """Refuse sweeps that the choices of a run ask for: Hydra has read those of the sweep."""
        own, read = (
            OmegaConf.select(each, "hydra.sweeper.params") or {} for each in (config, self._master)
        )
        if lost := [key for key in own if key not in read or own[key] != read[key]]:
            raise ConfigError(
                f"{' '.join(choices)}: its file sweeps over {', '.join(map(str, lost))} "
                "(hydra.sweeper.params), which has no effect if the choice itself is swept over. "
                "Submit each choice by a command of its own, or name the values on the command line"
            )

    def _parse_one(self, text: str) -> Override | None:
        """Return the override if it sets a value, or None if it belongs to the choices."""
        parsed: Override = OverridesParser.create().parse_override(quoted(text))
        if parsed.is_hydra_override() or parsed.key_or_group == "hydra":
            return None
        values = Overrides(self._loader.repository, [parsed]).config_overrides
        return parsed if values else None


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
        with our_files():
            yield _call([quoted(extending(text)) for text in overrides], config_dir)
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(explain(error, known_keys())) from error


def _call(overrides: list[str], config_dir: str | os.PathLike[str] | None) -> _Call:
    setup_globals()  # the resolver `now`
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
    here = launcher_keys.is_local(master.hydra.launcher)
    return _Call(Composer(loader, master), runs, Path(str(master.hydra.sweep.dir)), here)


_SWEEPER = "hydra_plugins.hpctrain_launcher.HpctrainSweeper"
