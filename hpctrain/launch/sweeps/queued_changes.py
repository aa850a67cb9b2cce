"""Say which values of runs under way differ from what was typed now: a queued job keeps its own."""

from collections.abc import Iterator
from typing import Any

from hpctrain import yaml_file
from hpctrain.config.frozen import dump, types, values_of
from hpctrain.config.identity import changeable
from hpctrain.errors import ConfigError
from hpctrain.launch.entry import Entry, Status
from hpctrain.launch.output import runs, say
from hpctrain.terminal import few

# These keys act on the command that is typed, and not on the job.
_OF_THE_COMMAND = {
    *("name", "output_dir", "launch.rerun", "launch.snapshot"),
    *("launch.wait", "launch.dry_run"),
}


def say_changes(entries: list[Entry]) -> None:
    """Name the keys that differ for runs that are queued or running, and how to replace them."""
    groups: dict[tuple[bool, str], list[Entry]] = {}
    for entry in entries:
        if entry.status is Status.UNDER_WAY and (found := ", ".join(changes(entry))):
            groups.setdefault((entry.detail == "pending", found), []).append(entry)
    for (waits, found), group in groups.items():
        first = group[0].run.name
        cure = (
            "launch.rerun=queued replaces waiting jobs"
            if waits
            else f"first stop it: `python -m hpctrain cancel {first} --save`"
        )
        names = few((entry.run.name for entry in group), 1)
        say(
            f"{names}: {runs(len(group))} under way with other values, which stay as they "
            f"are: {found}. To change that, {cure}",
            style="yellow",
        )


def changes(entry: Entry) -> Iterator[str]:
    """Yield what differs between the frozen config of a run and the config that was typed now."""
    try:
        before = dict(_flat(values_of(entry.run.config_file)))
    except ConfigError:
        return
    now = dict(_flat(yaml_file.parse(dump(entry.config), "the config", types())))
    if before != now:
        sections = tuple(f"{name}." for name in changeable())
        for key in now:
            if key in _OF_THE_COMMAND or not f"{key}.".startswith(sections):
                continue
            if before.get(key) != now[key]:
                yield f"{key}={_text(before.get(key))} (typed now: {_text(now[key])})"
    if entry.code and (code := entry.before.code) and code != entry.code.digest:
        yield "the code as it was then"


def _flat(node: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every value with its dotted key."""
    if isinstance(node, dict) and node:
        for name, value in node.items():
            yield from _flat(value, f"{key}.{name}" if key else str(name))
    else:
        yield key, node


def _text(value: Any) -> str:
    return "null" if value is None else str(value)
