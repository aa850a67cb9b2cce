"""Let Hydra read its files with `hpctrain.yaml_file`, as long as it composes for us."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import resources
from pathlib import Path

from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra._internal.core_plugins.importlib_resources_config_source import (
    ImportlibResourcesConfigSource,
)
from hydra._internal.sources_registry import SourcesRegistry
from hydra.plugins.config_source import ConfigLoadError, ConfigResult, ConfigSource
from omegaconf import OmegaConf

from hpctrain import yaml_file
from hpctrain.config.frozen import types


class _Files(FileConfigSource):
    def load_config(self, config_path: str) -> ConfigResult:
        path = Path(self.path, self._normalize_file_name(config_path)).resolve()
        return _read(self, config_path, yaml_file.content(path), str(path))


class _Packages(ImportlibResourcesConfigSource):
    def load_config(self, config_path: str) -> ConfigResult:
        file = resources.files(self.path).joinpath(self._normalize_file_name(config_path))
        if not file.is_file():
            raise ConfigLoadError(f"Config not found : {config_path}")
        return _read(self, config_path, file.read_bytes(), str(file))


@contextmanager
def our_sources() -> Iterator[None]:
    """Make Hydra use these classes; other programs in this process have its own afterwards."""
    found = SourcesRegistry.instance().types
    before = dict(found)
    found.update(file=_Files, pkg=_Packages)
    try:
        yield
    finally:
        found.update(before)


def _read(source: ConfigSource, config_path: str, content: bytes, where: str) -> ConfigResult:
    header = ConfigSource._get_header_dict(content[:512].decode(errors="replace"))
    group = config_path.rpartition("/")[0].replace("/", ".")
    package = (header.get("package") or "_group_").replace("_group_", group)
    prefix = "" if package == "_global_" else package
    values = yaml_file.parse(content, where, types(), prefix)
    config = OmegaConf.create({} if values is None else values)
    return ConfigResult(source.provider, f"{source.scheme()}://{source.path}", config, header)
