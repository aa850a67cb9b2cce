"""Compose the many configs of a sweep, with Hydra's result but much faster.

`compose` composes the config of one command line. Hydra takes 25 to 70 ms per config, nearly all of
it for the defaults list and its files. These depend only on the choices (`model=mlp`,
`experiment=digits`) and not on the values (`optimizer.lr=1e-3`). So each set of choices is composed
once. Then Hydra's own function writes the values into it, in the order of the command line.
"""

import copy
import functools
import re
from contextlib import suppress
from typing import Any

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.defaults_list import Overrides
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from hpctrain.config import launcher_keys
from hpctrain.config.composing.compose import as_asked
from hpctrain.config.composing.template import Template
from hpctrain.config.composing.text_values import is_text, quoted
from hpctrain.config.explain import explain
from hpctrain.config.frozen import from_omegaconf, known_keys
from hpctrain.config.schema import Config
from hpctrain.errors import ConfigError

# What runs have in common that differ only in plain values: the other overrides, and the keys.
Kind = tuple[tuple[str, ...], tuple[str, ...]]
_KEPT = 64  # templates; each holds a whole config
_NUMBER = re.compile(r"((?!hydra\b)[a-z_][\w.]*)=(-?(?:0|[1-9]\d*)(\.\d+)?)", re.ASCII)


class Composer:
    """Composes one config after another; `master` is the config of the sweep itself."""

    def __init__(self, loader: ConfigLoaderImpl, master: DictConfig) -> None:
        self._loader, self._master = loader, master
        folders = master.hydra.runtime.config_sources
        self.config_dir = next((f.path for f in folders if f.provider == "command-line"), "")
        self._bases: dict[tuple[str, ...], DictConfig] = {}
        self.notes: dict[str, None] = {}  # lines for the user, in their order
        self._read: dict[str, str] = {}  # of the keys of `hydra.launcher`, by our key: the line
        self._undo: tuple[dict[str, Any], dict[str, Any]] = {}, {}
        self._parse = functools.cache(self._parse_one)
        self._plain = functools.cache(self._plain_value)
        self._templates: dict[Kind, Template | None] = {}
        self._met: set[Kind] = set()

    def __call__(self, overrides: list[str]) -> DictConfig:
        """Return the config of these overrides, without its `hydra` section.

        The next call changes the returned object: use it before. Hydra raises its errors and
        OmegaConf's.
        """
        content, original = self._undo
        content.clear()
        content.update(original)
        values = [parsed for text in overrides if (parsed := self._parse(text)) is not None]
        choices = tuple(text for text in overrides if self._parse(text) is None)
        if choices not in self._bases:
            self._bases[choices] = self._compose(list(choices))
        for key in {value.key_or_group for value in values} & self._read.keys():
            line = self._read.pop(key)
            self.notes.pop(line, None)
            self.notes[f"{line.partition(' is ')[0]} has no effect: {key} is given, too"] = None
        return self._change(self._bases[choices], values)

    def is_choice(self, override: str) -> bool:
        """Return whether an override chooses a file, such as `model=unet`, or is one of Hydra."""
        return self._parse(override) is None

    def typed(self, overrides: list[str]) -> Config:
        """Return the typed config; a wrong key, value or choice is a ConfigError."""
        try:
            kind, values = self._split(overrides)
            if (template := self._templates.get(kind)) is not None:
                # Where a template refuses a value, Hydra below finds the words for the error.
                with suppress(OmegaConfBaseException):
                    return as_asked(template.config(values))
            tree = self(overrides)
            config = as_asked(from_omegaconf(tree))
        except (HydraException, OmegaConfBaseException) as error:
            raise ConfigError(explain(error, known_keys())) from error
        if kind not in self._met:  # perhaps the only run of its kind
            self._met.add(kind)
        elif kind not in self._templates:
            self._templates[kind] = self._template(kind, tree)
            made = [kind for kind, template in self._templates.items() if template is not None]
            self._templates |= dict.fromkeys(made[:-_KEPT])
        return config

    def _split(self, overrides: list[str]) -> tuple[Kind, dict[str, Any]]:
        """Return the kind of a run, and its plain values by their keys."""
        found = [(text, self._plain(text)) for text in overrides]
        values = [plain for _, plain in found if plain is not None]
        others = tuple(text for text, plain in found if plain is None)
        return (others, tuple(name for name, _ in values)), dict(values)

    def _template(self, kind: Kind, tree: DictConfig) -> Template | None:
        """Return the template of a kind; None if one of its values is not just a plain value."""
        others, names = kind
        changed = [value.key_or_group for text in others if (value := self._parse(text))]
        for place, name in enumerate(names):
            for other in (*changed, *names[:place]):
                if f"{name}.".startswith(f"{other}.") or other.startswith(f"{name}."):
                    return None
        with suppress(LookupError):
            return Template(copy.deepcopy(tree), names)
        return None

    def _plain_value(self, text: str) -> tuple[str, Any] | None:
        """Return key and value of an override that only sets a plain value, otherwise None."""
        number = _NUMBER.fullmatch(text)
        if number and not is_text(number[1]):  # Hydra's parser takes a millisecond
            return number[1], (float if number[3] else int)(number[2])
        parsed = self._parse(text)
        if parsed is None or parsed.type is not OverrideType.CHANGE or parsed.package is not None:
            return None
        value = None if parsed.is_sweep_override() else parsed.value()
        is_special = isinstance(value, str) and ("${" in value or value == "???")
        is_plain = isinstance(value, str | int | float) and not is_special
        return (parsed.key_or_group, value) if is_plain else None

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

    def _change(self, base: DictConfig, values: list[Override]) -> DictConfig:
        """Write the values into the base, and note how to undo that.

        Only the sections that change are copied: copying all takes longer than everything else.
        """
        content = base.__dict__["_content"]
        self._undo = content, dict(content)
        for name in {str(value.key_or_group).split(".")[0] for value in values} & content.keys():
            content[name] = copy.deepcopy(content[name])
        ConfigLoaderImpl._apply_overrides_to_config(values, base)
        return base

    def _parse_one(self, text: str) -> Override | None:
        """Return the override if it sets a value, or None if it belongs to the choices."""
        parsed: Override = OverridesParser.create().parse_override(quoted(text))
        if parsed.is_hydra_override() or parsed.key_or_group == "hydra":
            return None
        values = Overrides(self._loader.repository, [parsed]).config_overrides
        return parsed if values else None
