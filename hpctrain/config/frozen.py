"""Turn a composed config into the typed config of a run, write it to a file, and read it back.

    YAML and command line ── Hydra ── from_omegaconf() ── Config (typed) ── validate() ── freeze()
                                                           ▲
    config.yaml of a run directory ──── load() ────────────┘

`hpctrain.config.schema` has the keys. This module does not import torch, because the login node
validates whole sweeps with it.
"""

import functools
import hashlib
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from hpctrain.base import secrets
from hpctrain.base.errors import ConfigError, DamageError
from hpctrain.base.files import yaml_file
from hpctrain.base.files.disk import expanded
from hpctrain.base.gone import without_gone_keys
from hpctrain.base.names.run_record import RunRecord
from hpctrain.base.terminal.terminal import few
from hpctrain.config.explain import explain, unknown_key
from hpctrain.config.rules.own_loop import OURS
from hpctrain.config.schema import Config, LaunchConfig, all_keys, all_members


def from_omegaconf(node: DictConfig) -> Config:
    """Turn Hydra's composed config, or a frozen one, into the typed config with absolute paths.

    The section `hydra` is ignored. An unknown key, a missing mandatory value, or an interpolation
    that cannot be resolved is a ConfigError.
    """
    return with_absolute_paths(typed(node))


def typed(node: DictConfig) -> Config:
    """Return the typed config as `from_omegaconf`, but with the paths as they are given."""
    try:
        if "hydra" in node:
            node = OmegaConf.masked_copy(node, [str(key) for key in node if key != "hydra"])
        # Hydra composes into the schema, so its sections have types; those of a file have none.
        if OmegaConf.get_type(node, "launch") is not LaunchConfig:
            plain = OmegaConf.to_container(node)
            node = DictConfig(OmegaConf.merge(OmegaConf.structured(Config), plain))
        own = OmegaConf.select(node, "loop._target_") not in (None, OURS)
        if own and OmegaConf.is_missing(node.data, "path"):
            node.data.path = ""  # the loop may make its own data
        values = OmegaConf.to_container(node, resolve=True, throw_on_missing=True)
    except MissingMandatoryValue as error:
        missing = min(OmegaConf.missing_keys(node))
        raise ConfigError(
            f"{missing} is missing: give {missing}=VALUE, or choose an experiment=NAME "
            "that does (python -m hpctrain --help all lists them)"
        ) from error
    except OmegaConfBaseException as error:
        raise ConfigError(explain(error, known_keys())) from error
    # The schema has checked the types of the values, but `+train.typo=1` adds a key.
    config: Config = _typed(Config, values)
    return config


def with_absolute_paths(config: Config) -> Config:
    """Make the paths of a config absolute, in place, and return it."""
    config.output_dir = os.path.abspath(expanded(config.output_dir, "output_dir"))
    if config.data.path:  # a loop may make its own data
        config.data.path = _absolute(config.data.path, "data.path")
    if config.data.subset is not None and config.data.subset.endswith(".npy"):
        config.data.subset = _absolute(config.data.subset, "data.subset")
    for part in (*config.data.mixture, *config.data.val_sets):
        if isinstance(part.get("path"), str):
            part["path"] = _absolute(part["path"], "path")
    if config.checkpoint.init_from is not None:
        config.checkpoint.init_from = _absolute(config.checkpoint.init_from, "checkpoint.init_from")
    if config.site.rules is not None:
        config.site.rules = _absolute(config.site.rules, "site.rules")
    if config.tracking.uri is None:
        own = f"sqlite:///{config.output_dir}/mlflow.db"
        config.tracking.uri = os.environ.get("MLFLOW_TRACKING_URI") or own
    return config


def _absolute(path: str, key: str) -> str:
    """Make a path absolute; a URL stays as it is."""
    return path if "://" in path else os.path.abspath(expanded(path, key))


def _typed(schema: Any, values: Any, prefix: str = "") -> Any:
    """Build a dataclass from plain values; OmegaConf's own function takes ten times as long."""
    members = {member.name: member.default_factory for member in fields(schema)}
    for name in values.keys() - members.keys():
        raise ConfigError(unknown_key(f"{prefix}{name}", known_keys()))
    given = {}
    for name, value in values.items():
        section: Any = members[name]
        inner = f"{prefix}{name}."
        given[name] = _typed(section, value, inner) if is_dataclass(section) else value
    return schema(**given)


def load(path: Path, overrides: Sequence[str] = ()) -> Config:
    """Read a frozen config.yaml, with `KEY=VALUE` for each key that changes.

    A file that cannot be read, or does not fit the schema, or an override that does not, is a
    ConfigError.
    """
    for text in overrides:
        section = text.partition("=")[0]
        if any(known.startswith(f"{section}.") for known in known_keys()):
            raise ConfigError(
                f"{text}: only single values of a frozen config change, {section}.KEY=VALUE; a "
                f"choice for the whole section {section} is made when a run is first asked for"
            )
    node = DictConfig(without_gone_keys(values_of(path), path))
    try:
        for text in overrides:
            key, _, value = text.partition("=")
            OmegaConf.update(node, key, yaml_file.parse(value, text, types(), key), force_add=True)
        config = from_omegaconf(node)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{' '.join(overrides)}: {' '.join(str(error).split())}") from error
    except ConfigError as error:
        if overrides:
            raise
        raise ConfigError(f"{path}: {error}") from error
    if OmegaConf.select(node, _LAST) is None:
        raise ConfigError(f"{path}: it is damaged: it ends before {_LAST}")
    return config


_MOST = 12  # names of functions in a sentence
_LAST = "site.container.args"  # the last key of every file from before there were digests


def values_of(path: Path, record: RunRecord | None = None) -> dict[str, Any]:
    """Return the values of a frozen config.yaml, with its references to the environment.

    Give the `record` of the run if it was read already. A file that cannot be read, or is not what
    was written when it was frozen, is a ConfigError.
    """
    content = yaml_file.content(path)
    values = yaml_file.parse(content, str(path), types())
    if not isinstance(values := {} if values is None else values, dict):
        raise ConfigError(f"{path}: cannot be read as a frozen config (it has no keys)")
    written: tuple[str, ...] = ()  # a run that was frozen before there were digests has none
    with suppress(DamageError):
        written = (record or RunRecord.of(path.parent)).config_digests
    if written and digest(content) not in written:
        raise ConfigError(
            f"{path}: it is damaged, or was changed after it was frozen: its digest is not in "
            "run.json. The command that has made the run writes it again"
        )
    return values


def digest(content: bytes) -> str:
    """Return the digest of a frozen config, for `config_digests` in run.json."""
    return hashlib.sha256(content).hexdigest()


def dump(config: Config) -> str:
    """Return the config as YAML. All values are resolved, except the secrets of the environment."""
    values = secrets.referenced(plain(config), secrets.known(), _escape)
    text: str = yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True)
    return text


def _escape(text: str) -> str:
    # In a resolved value `${` is text and not an interpolation.
    return re.sub(r"(\\*)\$\{", lambda found: 2 * found[1] + "\\${", text)


class _Dumper(getattr(yaml, "CSafeDumper", yaml.SafeDumper)):  # type: ignore[misc]
    """Writes YAML that `OmegaConf.load` reads back unchanged; its own dumper is 15 times slower."""


def _as_yaml(dumper: Any, text: str) -> Any:
    # Texts such as "1e-3" need quotes: OmegaConf would read a number, although YAML would not.
    style = '"' if re.fullmatch(r"[-+.\d].*|nan|inf", text, re.I | re.S) else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _as_yaml)


def plain(section: Any) -> dict[str, Any]:
    """Return a section as nested dicts. The values are not copied, unlike `dataclasses.asdict`."""
    return {
        name: value if isinstance(value, _PLAIN) or not is_dataclass(value) else plain(value)
        for name, value in vars(section).items()
    }


def executed(config: Config) -> list[str]:
    """Return in words what a training with this config executes of it."""
    ours = {*targets(Config().loop)}  # nobody has asked for it
    called = list(dict.fromkeys(each for each in targets(plain(config)) if each not in ours))
    functions = [f"_target_ {few(called, _MOST)}"] if called else []
    return functions + ["the lines of site.setup"] * bool(config.site.setup)


def targets(node: Any) -> Iterator[str]:
    """Yield every `_target_` in a plain config, in its order."""
    if isinstance(node, dict):
        if isinstance(target := node.get("_target_"), str):
            yield target
        node = list(node.values())
    for inner in node if isinstance(node, list | tuple) else ():
        yield from targets(inner)


_PLAIN = (str, int, float, type(None), dict, list)  # `is_dataclass` takes much longer to say no


@functools.cache
def types() -> dict[str, str]:
    """Return the type of every key, as the schema writes it."""
    return {member.name: member.type for member in all_keys()}


def known_keys() -> list[str]:
    """Return every dotted name of the schema, each section before its keys."""
    return [member.name for member in all_members()]
