"""The configs of trials, composed where a worker runs: without Hydra's files, and without edits.

    command line ── Composer ── a base for each combination of choices ── bases/3fa92c1b.yaml
    model=unet optimizer.lr=3e-4 ── the base of model=unet ── optimizer.lr=3e-4 ── typed Config

A base is the composed config with its interpolations, but without the searched values. So a file in
`conf/experiment` may be edited while the search runs, and a trial still is what the same command
line with KEY=VALUE had made when the search began.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from hpctrain.config.composing.compose import scaled
from hpctrain.config.composing.compose_sweep import Composer
from hpctrain.config.composing.text_values import quoted
from hpctrain.config.explain import explain
from hpctrain.config.frozen import from_omegaconf, known_keys
from hpctrain.config.rules import metrics
from hpctrain.config.schema import Config
from hpctrain.disk import write_atomically
from hpctrain.errors import ConfigError, StorageError
from hpctrain.runs.freeze import check
from hpctrain.runs.run_dir import RunDir
from hpctrain.secrets import reference

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution

_MOST = 1000  # combinations of choices


class Bases:
    """The composed configs without the searched values, by the searched choices.

    `cwd` is where the command was given: relative paths of a config belong to it.
    """

    def __init__(self, texts: Mapping[str, str], choices: Iterable[str], cwd: str) -> None:
        self._texts, self.choices, self._cwd = dict(texts), [*choices], cwd

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
        combinations = list(itertools.islice(itertools.product(*choices.values()), _MOST + 1))
        if len(combinations) > _MOST:
            raise ConfigError(
                f"{' '.join(choices)}: more than {_MOST} combinations of choices; search over "
                "fewer of them"
            )
        texts = {}
        for values in combinations:
            own = [f"{key}={value}" for key, value in zip(choices, values, strict=True)]
            try:
                tree = composer([*fixed, *own])
                texts[_name(own)] = reference(OmegaConf.to_yaml(tree))
            except (HydraException, OmegaConfBaseException) as error:
                raise ConfigError(explain(error, known_keys())) from error
        return cls(texts, choices, os.getcwd())

    @classmethod
    def read(cls, folder: Path, choices: Iterable[str], cwd: str) -> Bases:
        """Return those that `write` has left."""
        texts = {file.stem: file.read_text() for file in folder.glob("*.yaml")}
        return cls(texts, choices, cwd)

    def write(self, folder: Path) -> None:
        """Write them; those of an earlier command for the same search stay."""
        folder.mkdir(exist_ok=True)
        for name, text in self._texts.items():
            if not (file := folder / f"{name}.yaml").exists():
                write_atomically(file, text)

    def check_alike(self) -> None:
        """Raise a ConfigError if choices differ in what a worker has from its start."""
        if len(self._texts) == 1:
            return
        kinds: dict[str, str] = {}
        for text in self._texts.values():
            base: Any = OmegaConf.create(text)
            for section in ("launch", "site", "network"):
                value = json.dumps(OmegaConf.to_container(base[section]), sort_keys=True)
                if kinds.setdefault(section, value) != value:
                    raise ConfigError(
                        f"{' '.join(self.choices)}: the choices differ in {section}.*, which a "
                        "worker has from its start; a search needs the same for all trials"
                    )

    def config(self, params: Mapping[str, Any]) -> Config:
        """Return the typed config of a trial; what does not fit is a ConfigError."""
        given = [f"{key}={value}" for key, value in params.items()]
        name = _name([f"{key}={params[key]}" for key in self.choices if key in params])
        if name not in self._texts:
            raise ConfigError(f"{' '.join(given)}: the search has no base for these choices")
        values = [
            quoted(text) for key, text in zip(params, given, strict=True) if key not in self.choices
        ]
        try:
            tree = OmegaConf.merge(
                OmegaConf.structured(Config), OmegaConf.create(self._texts[name])
            )
            assert isinstance(tree, DictConfig)
            OmegaConf.set_struct(tree, True)
            overrides = OverridesParser.create().parse_overrides(values)
            ConfigLoaderImpl._apply_overrides_to_config(overrides, tree)
            with _inside(self._cwd):
                return scaled(from_omegaconf(tree))
        except (HydraException, OmegaConfBaseException) as error:
            raise ConfigError(explain(error, known_keys())) from error

    def run(self, params: Mapping[str, Any]) -> tuple[Config, RunDir]:
        """Return the checked config of a trial and its run directory, which need not exist.

        A config with which no run is possible, or that does not give the metric, is an
        HpctrainError.
        """
        config = self.config(params)
        run = check(config)
        if missing := list(metrics.problems(config, needed=True)):
            raise ConfigError("\n".join(missing))
        return config, run


def _name(choices: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(choices).encode()).hexdigest()[:8]


def _inside(folder: str) -> contextlib.AbstractContextManager[None]:
    if folder == os.getcwd():
        return contextlib.nullcontext()
    try:
        return contextlib.chdir(folder)
    except OSError as error:
        raise StorageError(f"{folder}: cannot be entered here ({error.strerror})") from error
