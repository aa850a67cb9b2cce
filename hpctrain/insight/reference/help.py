"""`--help`: what a beginner needs (help.txt), `--help all` (help_all.txt), and `--help NAME`."""

import json
import textwrap
from pathlib import Path

from hpctrain.base.files import yaml_file
from hpctrain.base.files.yaml_file import conf_dir, groups
from hpctrain.config.schema import all_members
from hpctrain.insight.reference import keys

# conf/config.yaml does not name these groups, so Hydra adds a choice of them.
_ADDED = ("scaling",)

ALL = Path(__file__).with_name("help_all.txt").read_text()


def show(topics: list[str]) -> int:
    """Print the help, or what is known of keys or metrics by their names or words."""
    if topics == ["json"]:
        schema = yaml_file.read(Path(__file__).with_name("output.yaml"))
        print(json.dumps(schema, indent=2))
    elif topics == ["all"]:
        made = groups(conf_dir()).items()
        listed = [f"{as_typed(name):<12} {', '.join(choices)}" for name, choices in made]
        columns = ["\n".join(map(_folded, lines)) for lines in (listed, _sections())]
        print(ALL.format(groups=columns[0] + "\n", keys=columns[1]), end="")
    elif not topics:
        print(Path(__file__).with_name("help.txt").read_text(), end="")
    else:
        keys.show(topics)
    return 0


def as_typed(group: str) -> str:
    """Return how a command line names a group: those of no usual run need a plus, `+scaling`."""
    return f"+{group}" if group in _ADDED else group


def _sections() -> list[str]:
    """Return one line per section of the schema: its name and its keys."""
    return [
        f"{member.name + '.':<12} {', '.join(vars(member.default))}"
        for member in all_members()
        if member.is_section and "." not in member.name
    ]


def _folded(line: str) -> str:
    """Return a name and its words in 80 columns, indented."""
    return textwrap.fill(
        line, 79, initial_indent="  ", subsequent_indent=15 * " ", break_on_hyphens=False
    )
