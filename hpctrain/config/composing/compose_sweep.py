"""Compose the many configs of a sweep, with Hydra's result but much faster.

`compose` composes the config of one command line. Hydra takes 25 to 70 ms per config, nearly all of
it for the defaults list and its files. These depend only on the choices (`model=mlp`,
`experiment=digits`) and not on the values (`optimizer.lr=1e-3`). So each set of choices is composed
once. Then Hydra's own function writes the values into it, in the order of the command line.
"""

import functools
import pickle
from typing import Any

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.defaults_list import Overrides
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from hpctrain.base.errors import ConfigError
from hpctrain.config import launcher_keys
from hpctrain.config.composing.compose import as_asked, quoted
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
