"""What `--help` lists: the choices in `conf/` and the sections of the schema; no Hydra needed."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from hpctrain.config.schema import Config


def conf_dir() -> Path:
    """The configs that come with the package: beside it in a checkout, inside it in a wheel."""
    package = Path(__file__).resolve().parents[1]
    inside = package / "conf"
    return inside if inside.is_dir() else package.parent / "conf"


def groups(conf: Path) -> dict[str, list[str]]:
    """Config groups and their choices, in the folder's alphabetical order."""
    folders = (path for path in sorted(conf.iterdir()) if path.is_dir() and path.name != "hydra")
    return {folder.name: sorted(p.stem for p in folder.glob("*.yaml")) for folder in folders}


def sections() -> list[str]:
    """One line a section of the schema: its name and its keys."""
    lines = []
    for member in fields(Config):
        section: Any = member.default_factory
        if is_dataclass(section):
            keys = ", ".join(inner.name for inner in fields(section))
            lines.append(f"{member.name + '.':<12} {keys}")
    return lines
