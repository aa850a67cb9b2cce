"""The text of a site file, and a site file as it is read again."""

import textwrap
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from hpctrain.base.errors import ConfigError
from hpctrain.base.files import yaml_file
from hpctrain.config.schema import ContainerConfig, SiteConfig
from hpctrain.insight.site.choices import Line


def text(head: Iterable[str], lines: Iterable[Line], notes: Iterable[str]) -> str:
    """Return the file: each line has a comment above it, which says where it is from."""
    parts = [*map(_comment, head), ""]
    for line in lines:
        parts += [_comment(line.why), _entry(line)]
    return "\n".join([*parts, "", *map(_comment, notes)]) + "\n"


def _comment(words: str) -> str:
    flat = " ".join(words.split())
    return textwrap.fill(
        flat, 98, initial_indent="# ", subsequent_indent="#   ", break_on_hyphens=False
    )


def _entry(line: Line) -> str:
    flow = None if isinstance(line.value, dict) else True
    entry: str = yaml.safe_dump({line.key: line.value}, default_flow_style=flow, width=10_000)
    return entry.strip().removeprefix("{").removesuffix("}") if flow else entry.rstrip()


def read(path: Path) -> SiteConfig:
    """Return the site of a file; what is no key, or has another type, is a ConfigError."""
    try:
        merged = OmegaConf.merge(OmegaConf.structured(SiteConfig), yaml_file.read(path) or {})
    except OmegaConfBaseException as error:
        raise ConfigError(f"{path}: {str(error).splitlines()[0]}") from error
    found: dict[str, Any] = OmegaConf.to_container(merged)  # type: ignore[assignment]
    return SiteConfig(**found | {"container": ContainerConfig(**found["container"])})
