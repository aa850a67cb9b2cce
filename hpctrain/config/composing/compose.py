"""Compose the config of one command line, by Hydra. `compose_sweep` composes those of a sweep."""

import os
import re
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from typing import Any, NoReturn

import hydra
import hydra._internal.hydra as implementation
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra._internal.core_plugins.importlib_resources_config_source import (
    ImportlibResourcesConfigSource,
)
from hydra._internal.sources_registry import SourcesRegistry
from hydra._internal.utils import get_args_parser
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from hydra.plugins.config_source import ConfigLoadError, ConfigResult, ConfigSource
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from hpctrain.base.errors import ConfigError, HpctrainError, StorageError
from hpctrain.base.files import yaml_file
from hpctrain.base.files.yaml_file import conf_dir, groups
from hpctrain.config.explain import as_default, explain, of_section, same_name
from hpctrain.config.frozen import from_omegaconf, known_keys, types
from hpctrain.config.rules.combinations import refused
from hpctrain.config.schema import Config, all_keys, all_members

_NUMBERS = ("int", "int | None", "float", "float | None", "list[int]", "list[int] | None")


def compose(argv: list[str]) -> Config | None:
    """Compose the config of a command line; None if Hydra did something else (`-m`, `--cfg`).

    A wrong key, value or choice is a ConfigError, and a folder of a sweep that cannot be written a
    StorageError.
    """
    composed: list[DictConfig] = []

    def keep(config: DictConfig) -> None:  # its module is `hydra.job.name`
        composed.append(config)

    own_argv = sys.argv
    overrides, _ = words(argv)
    given = [quoted(extending(text)) for text in overrides]
    # Let Hydra raise its errors instead of printing a long report and exiting with 1.
    os.environ["HYDRA_FULL_ERROR"] = "1"
    # Hydra 1.3 wants all overrides side by side; `experiment=digits -m seed=1,2` works here.
    sys.argv = [own_argv[0], *(text for text in argv if text not in overrides), *given]
    try:
        with our_files():
            hydra.main(str(conf_dir()), "config", "1.3")(keep)()
    except (HydraException, OmegaConfBaseException, OSError, ValueError) as error:
        if told := _told(error):
            raise told from error
        raise
    finally:
        del os.environ["HYDRA_FULL_ERROR"]
        sys.argv = own_argv
    if len(composed) > 1 or (composed and _mode(argv) == RunMode.MULTIRUN):
        raise ConfigError(
            "hydra/launcher: -m needs hpctrain (the default), submitit_slurm or submitit_local; "
            "nothing was started"
        )
    return as_asked(from_omegaconf(composed[0])) if composed else None


def _mode(argv: list[str]) -> RunMode:
    return RunMode.MULTIRUN if {"-m", "--multirun"} & {*argv} else RunMode.RUN


def _told(error: Exception) -> HpctrainError | None:
    """Return what is wrong with the command line; None for an error of the program."""
    if isinstance(error, HydraException | OmegaConfBaseException):
        return ConfigError(explain(error, known_keys()))
    if isinstance(error, OSError):
        where = f"cannot write {error.filename} ({error.strerror})"
        return StorageError(f"output_dir: {where}") if error.filename else None
    # Hydra itself refuses the command line, as `model=null` or `-m --cfg job`.
    frame = traceback.extract_tb(error.__traceback__)[-1]
    of_hydra = frame.filename.startswith(f"{Path(hydra.__file__).parent}{os.sep}")
    return ConfigError(str(error)) if of_hydra else None


def as_asked(config: Config) -> Config:
    """Return the config, in which a weak scaling series has the batch of its nodes.

    +scaling=weak train.global_batch_size=64 launch.nodes=1,2,4 makes 64, 128 and 256 samples. A
    frozen config has the batch that it trains. Such a series with a range of nodes is a
    ConfigError, as are keys that would do nothing.
    """
    if problems := [*refused(config, "adapter_keys")]:
        raise ConfigError("\n".join(problems))
    return config if config.scaling is None else _scaled(config)


def _scaled(config: Config) -> Config:
    nodes = config.launch.node_numbers
    if len(nodes) > 1:
        raise ConfigError(
            f"launch.nodes={config.launch.nodes}: with scaling={config.scaling} each run needs a "
            "fixed number of nodes, as in launch.nodes=1,2,4"
        )
    if config.scaling == "weak":
        config.train.global_batch_size *= nodes.start
        config.train.batch_size_ramp = [
            {name: n if name == "steps" else n * nodes.start for name, n in stage.items()}
            for stage in config.train.batch_size_ramp
        ]
    return config


def extending(override: str) -> str:
    """Return an override by which a free section, such as `parallel.plan={a.*: colwise}`, may grow.

    Hydra itself refuses names that the section does not have yet, unless the override has `++`.
    """
    name, _, value = override.partition("=")
    free = (key.name for key in all_keys() if key.type.startswith("dict") and "." in key.name)
    return f"++{override}" if value.lstrip().startswith("{") and name in free else override


def quoted(override: str) -> str:
    """Return `name='true'` for `name=true`; an override of another type as it is.

    Hydra's grammar reads true, nan, 1e3 and 1_0 as values of their own, whatever the type of the
    key, and its sweeper writes them in its own way (True, 1000.0). So a text that is quoted stays
    what was typed, with and without `-m`, as from a file (`hpctrain.base.files.yaml_file`).
    A number that programs read differently, such as `010`, is a ConfigError.
    """
    name, equals, value = override.partition("=")
    key = name.lstrip("+")
    if re.search(r"""['"(){}$\\]""", value):
        return override
    declared = types().get(key) or types().get(key.rpartition(".")[0], "")
    if declared in yaml_file.TEXTS:
        return name + equals + re.sub(r"[^,[\]]+", _quoted, value)
    for part in re.split(r"[,[\]]", value) if declared in _NUMBERS else ():
        if yaml_file.is_disputed(part) and part[-1].isdigit():
            raise ConfigError(f"{override}: write the number {part} in plain decimal digits")
    return override


def _quoted(part: re.Match[str]) -> str:
    word = part[0].strip()
    return part[0] if yaml_file.is_text(word) else f"'{word}'"


@contextmanager
def our_files() -> Iterator[None]:
    """Let Hydra know the schema, read files as we do, and find our launcher by submitit's names.

    Other programs that use Hydra in this process find it as it was, with the launchers of
    hydra-submitit-launcher.
    """
    Plugins.instance()  # imports the plugins, which store their launchers
    store, sources = ConfigStore.instance(), SourcesRegistry.instance().types
    stored = store.repo["hydra"]["launcher"]
    before, readers = dict(stored), dict(sources)
    store.store(name="schema", node=Config)
    try:
        for name, node in _SUBMITIT.items():
            store.store(group="hydra/launcher", name=name, node=node, provider="hpctrain")
        sources.update(file=_Files, pkg=_Packages)
        setattr(implementation, ConfigLoaderImpl.__name__, _Once)
        yield
    finally:
        stored.update(before)
        sources.update(readers)
        setattr(implementation, ConfigLoaderImpl.__name__, ConfigLoaderImpl)


class _Once(ConfigLoaderImpl):
    """Gives Hydra's main function the config that it has composed before to read `hydra.mode`."""

    _first: DictConfig | None = None

    def load_configuration(  # type: ignore[override]
        self, config_name: str | None, overrides: list[str], run_mode: RunMode, **how: bool
    ) -> DictConfig:
        if not how.get("validate_sweep_overrides", True):  # the first time
            mode = _mode(sys.argv)
            self._first = super().load_configuration(config_name, overrides, mode, **how)
            return self._first
        first, self._first = self._first, None
        if first is None or run_mode != _mode(sys.argv):
            return super().load_configuration(config_name, overrides, run_mode, **how)
        parsed = OverridesParser.create().parse_overrides(overrides)
        self.validate_sweep_overrides_legal(parsed, run_mode, from_shell=True)
        first.hydra.mode = run_mode
        return first


class _Files(FileConfigSource):
    """Hydra's own, but for how a file is read."""

    def load_config(self, config_path: str) -> ConfigResult:
        path = Path(self.path, self._normalize_file_name(config_path)).resolve()
        return _read(self, config_path, yaml_file.content(path), str(path))


class _Packages(ImportlibResourcesConfigSource):
    """As `_Files`."""

    def load_config(self, config_path: str) -> ConfigResult:
        file = resources.files(self.path).joinpath(self._normalize_file_name(config_path))
        if not file.is_file():
            raise ConfigLoadError(f"Config not found : {config_path}")
        return _read(self, config_path, file.read_bytes(), str(file))


def _read(source: ConfigSource, config_path: str, content: bytes, where: str) -> ConfigResult:
    header = ConfigSource._get_header_dict(content[:512].decode(errors="replace"))
    group = config_path.rpartition("/")[0].replace("/", ".")
    package = (header.get("package") or "_group_").replace("_group_", group)
    prefix = "" if package == "_global_" else package
    values = yaml_file.parse(content, where, types(), prefix)
    if not isinstance(values := {} if values is None else values, dict):
        raise ConfigError(f"{where}: it has no keys")
    for name, value in _plain_sections(values, prefix):
        is_group = isinstance(value, str) and name in groups(conf_dir())
        cure = f"; the choice of a file is written {as_default(name, value)}" if is_group else ""
        given = "null" if value is None else value
        raise ConfigError(f"{where}: {name}: {given}: {of_section(name, known_keys())}{cure}")
    config = OmegaConf.create(values)
    return ConfigResult(source.provider, f"{source.scheme()}://{source.path}", config, header)


def _plain_sections(values: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    """Yield the sections of which a file gives one plain value; OmegaConf does not name them."""
    for member in all_members():
        if not (member.is_section or member.type.startswith("dict[")):
            continue
        node: Any = {prefix: values} if prefix else values
        for part in member.name.split("."):
            node = node.get(part, {}) if isinstance(node, dict) else {}
        if not isinstance(node, dict) and "${" not in str(node) and node != "???":
            yield member.name, node


# Not files of conf/hydra/launcher: Hydra would check those by the schemas of the plugin.
_SUBMITIT = {
    "submitit_slurm": {"defaults": ["hpctrain"]},
    "submitit_local": {"defaults": ["hpctrain", "_self_"], "local": True},
}


def words(argv: list[str]) -> tuple[list[str], str]:
    """Return the arguments that are neither flags of Hydra nor their values, and --config-dir."""

    def refuse(message: str) -> NoReturn:
        hint = _as_override(argv, message)
        raise ConfigError(f"{message}; {hint}--help shows what there is, --hydra-help Hydra's own")

    parser = get_args_parser()
    parser.allow_abbrev = False  # `--experiment` would be taken for a flag of Hydra
    parser.error = refuse  # type: ignore[method-assign]
    given = parser.parse_intermixed_args(argv)
    return given.overrides, os.path.abspath(given.config_dir) if given.config_dir else ""


def _as_override(argv: list[str], message: str) -> str:
    """Return how to write `--seed=1` as an override; "" if there is no such key or group."""
    known = [*groups(conf_dir()), *known_keys()]
    for text in (text for text in argv if text.startswith("-")):
        name, _, value = text.lstrip("-").partition("=")
        name = name.replace("-", "_")
        keys = [name] if name in known else same_name(name, known)
        if text.partition("=")[0] in message and len(keys) == 1:
            return f"write {keys[0]}={value or 'VALUE'}; "
    return ""
