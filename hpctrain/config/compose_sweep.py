"""Compose the configs of a sweep: as Hydra does, but the common part of them once.

Of Hydra's 25 to 70 ms a config nearly all go into reading the defaults list and its files, and
that depends on the chosen groups only (`model=mlp`, `experiment=digits`), not on values
(`optimizer.lr=1e-3`). So each set of choices is composed once, and its values are put, by Hydra's
own function and in the order typed, into a copy.
"""

from __future__ import annotations

import copy
import functools
from typing import Any

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.defaults_list import Overrides
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from hpctrain.config.explain import explain
from hpctrain.config.frozen import from_omegaconf, known_keys
from hpctrain.config.schema import Config
from hpctrain.errors import ConfigError


class Composer:
    """Composes one config after another.

    Args:
        loader: Hydra's, which knows the search path.
        master: the config of the sweep itself.
    """

    def __init__(self, loader: ConfigLoaderImpl, master: DictConfig) -> None:
        self._loader, self._master = loader, master
        self._bases: dict[tuple[str, ...], DictConfig] = {}
        self._undo: tuple[dict[str, Any], dict[str, Any]] = {}, {}
        self._parse = functools.cache(self._parse_one)

    def __call__(self, overrides: list[str]) -> DictConfig:
        """The config of these overrides, without its `hydra` section; good until the next call.

        Raises:
            HydraException: as Hydra would.
            OmegaConfBaseException: likewise.
        """
        content, original = self._undo
        content.clear()
        content.update(original)
        values = [parsed for text in overrides if (parsed := self._parse(text)) is not None]
        choices = tuple(text for text in overrides if self._parse(text) is None)
        if choices not in self._bases:
            self._bases[choices] = self._compose(list(choices))
        return self._change(self._bases[choices], values)

    def typed(self, overrides: list[str]) -> Config:
        """The typed config of these overrides.

        Raises:
            ConfigError: a key, value or choice is wrong.
        """
        try:
            return from_omegaconf(self(overrides))
        except (HydraException, OmegaConfBaseException) as error:
            raise ConfigError(explain(error, known_keys())) from error

    def _compose(self, choices: list[str]) -> DictConfig:
        config = self._loader.load_sweep_config(self._master, choices)
        own = [str(key) for key in config if key != "hydra"]
        config = OmegaConf.masked_copy(config, own)
        OmegaConf.set_struct(config, True)
        return config

    def _change(self, base: DictConfig, values: list[Override]) -> DictConfig:
        """Put the values into the base, and remember how to take them out again.

        Copying the whole of it takes longer than all the rest, so only those sections are copied.
        """
        content = base.__dict__["_content"]
        self._undo = content, dict(content)
        for name in {str(value.key_or_group).split(".")[0] for value in values} & content.keys():
            content[name] = copy.deepcopy(content[name])
        ConfigLoaderImpl._apply_overrides_to_config(values, base)
        return base

    def _parse_one(self, text: str) -> Override | None:
        """The override, when it is a value; None when it takes part in the choices."""
        parsed: Override = OverridesParser.create().parse_override(text)
        if parsed.is_hydra_override() or parsed.key_or_group == "hydra":
            return None
        values = Overrides(self._loader.repository, [parsed]).config_overrides
        return parsed if values else None
