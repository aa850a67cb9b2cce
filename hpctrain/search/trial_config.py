"""The configs of trials, composed where a worker runs: without Hydra's files, and without edits.

    command line ── Composer ── a base for each combination of choices ── bases.json
    model=unet optimizer.lr=3e-4 ── the base of model=unet ── optimizer.lr=3e-4 ── typed Config

A base is the composed config with its interpolations, but without the searched values. So a file in
`conf/experiment` may be edited while the search runs, and a trial still is what the same command
line with KEY=VALUE had made when the search began.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import math
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from hpctrain.base.errors import ConfigError, StorageError
from hpctrain.base.files.record import Record
from hpctrain.base.secrets import reference
from hpctrain.config.composing.compose import as_asked, quoted
from hpctrain.config.composing.compose_sweep import Composer
from hpctrain.config.explain import explain
from hpctrain.config.frozen import from_omegaconf, known_keys
from hpctrain.config.rules import metrics
from hpctrain.config.schema import Config
from hpctrain.runs.freeze import check
from hpctrain.runs.run_dir import RunDir

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution

_MOST = 1000  # combinations of choices
_ALIKE = "launch", "site", "network"


class Bases(Record, frozen=True, kw_only=True):
    """The content of bases.json: the composed configs, by a name of the searched choices."""

    LARGEST: ClassVar[int] = 64 << 20

    texts: dict[str, str]  # in YAML, without the searched values
    choices: tuple[str, ...]  # the searched keys that choose files, such as `model`
    cwd: str  # where the command was given: relative paths of a config belong to it

    @classmethod
    def of(
        cls, composer: Composer, fixed: Sequence[str], space: Mapping[str, BaseDistribution]
    ) -> Bases:
        """Compose a base for each combination of the searched choices, such as `model=mlp,unet`."""
        from optuna.distributions import CategoricalDistribution

        choices = {
            key: found.choices
            for key, found in space.items()
            if isinstance(found, CategoricalDistribution)
            and any(composer.is_choice(f"{key}={value}") for value in found.choices)
        }
        if math.prod(map(len, choices.values())) > _MOST:
            raise ConfigError(
                f"{' '.join(choices)}: more than {_MOST} combinations of choices; search over "
                "fewer of them"
            )
        texts, alike = {}, list[Any]()
        for values in itertools.product(*choices.values()):
            own = [f"{key}={value}" for key, value in zip(choices, values, strict=True)]
            try:
                tree = composer([*fixed, *own])
                texts[_name(own)] = reference(OmegaConf.to_yaml(tree))
                alike.append(OmegaConf.to_container(OmegaConf.masked_copy(tree, [*_ALIKE])))
            except (HydraException, OmegaConfBaseException) as error:
                raise ConfigError(explain(error, known_keys())) from error
        for section in _ALIKE:
            if any(each[section] != alike[0][section] for each in alike):
                raise ConfigError(
                    f"{' '.join(choices)}: the choices differ in {section}.*, which a worker has "
                    "from its start; a search needs the same for all trials"
                )
        return cls(texts=texts, choices=tuple(choices), cwd=os.getcwd())

    def run(self, params: Mapping[str, Any]) -> tuple[Config, RunDir]:
        """Return the checked config of a trial and its run directory, which need not exist.

        A config with which no run is possible, or that does not give the metric, is an
        HpctrainError.
        """
        given = {key: f"{key}={value}" for key, value in params.items()}
        base = self.texts[_name([given[key] for key in self.choices])]
        values = [quoted(text) for key, text in given.items() if key not in self.choices]
        try:
            tree: Any = OmegaConf.merge(OmegaConf.structured(Config), OmegaConf.create(base))
            OmegaConf.set_struct(tree, True)
            overrides = OverridesParser.create().parse_overrides(values)
            ConfigLoaderImpl._apply_overrides_to_config(overrides, tree)
            with contextlib.chdir(self.cwd):
                config = as_asked(from_omegaconf(tree))
        except (HydraException, OmegaConfBaseException) as error:
            raise ConfigError(explain(error, known_keys())) from error
        except OSError as error:
            raise StorageError(
                f"{error.filename}: {error.strerror} (paths of this search begin in {self.cwd})"
            ) from error
        run = check(config)
        if missing := list(metrics.problems(config, needed=True)):
            raise ConfigError("\n".join(missing))
        return config, run


def _name(choices: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(choices).encode()).hexdigest()[:8]
