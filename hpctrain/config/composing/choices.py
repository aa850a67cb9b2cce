"""The lists in `--help`: the choices in `conf/` and the sections of the schema, without Hydra."""

from pathlib import Path

from hpctrain.config.schema import all_members

# conf/config.yaml does not name these groups, so Hydra adds a choice of them.
_ADDED = ("scaling",)


def groups(conf: Path) -> dict[str, list[str]]:
    """Return the config groups and the names of their choices, in alphabetical order."""
    folders = (path for path in sorted(conf.iterdir()) if path.is_dir() and path.name != "hydra")
    return {folder.name: sorted(p.stem for p in folder.glob("*.yaml")) for folder in folders}


def as_typed(group: str) -> str:
    """Return how a command line names a group: those of no usual run need a plus, `+scaling`."""
    return f"+{group}" if group in _ADDED else group


def sections() -> list[str]:
    """Return one line per section of the schema: its name and its keys."""
    return [
        f"{member.name + '.':<12} {', '.join(vars(member.default))}"
        for member in all_members()
        if member.is_section and "." not in member.name
    ]
