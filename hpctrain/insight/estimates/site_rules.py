"""What a site polices, in its own words: the file that `site.rules` names.

    idle_job: {limit: 60, says: "Jobs that leave their GPUs idle for an hour are cancelled."}

Each rule of the table below may be there; `says` is what `status`, `report` and `doctor` print.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from hpctrain.base.errors import ConfigError
from hpctrain.base.files import yaml_file

RULES = {
    "idle_job": "minutes in which no GPU of the job was used",
    "idle_gpus": "part of the GPUs of the job that are idle",
    "cores": "times the cores that were busy",
    "memory": "times the memory that was used",
    "time_limit": "times the time that the job has taken",
}


class _Rule(NamedTuple):
    """A bound of the site, which a job breaks that reaches it."""

    limit: float
    says: str


def read(path: str | None) -> dict[str, _Rule]:
    """Return the rules of a file; none without a file, and a ConfigError for a wrong one."""
    found = {} if path is None else yaml_file.read(Path(path))
    if not isinstance(found, dict):
        raise ConfigError(f"site.rules={path}: the file has no rules; {_allowed()}")
    return {str(name): _rule(path, str(name), value) for name, value in found.items()}


def _rule(path: str | None, name: str, value: Any) -> _Rule:
    wrong = f"site.rules={path}: {name}: {value}"
    if name not in RULES:
        raise ConfigError(f"{wrong}: no such rule; {_allowed()}")
    if not isinstance(value, dict) or {*value} != {"limit", "says"}:
        raise ConfigError(f"{wrong}: a rule is {{limit: NUMBER, says: TEXT}}")
    limit, says = value["limit"], value["says"]
    if isinstance(limit, bool) or not isinstance(limit, int | float) or limit <= 0:
        raise ConfigError(f"{wrong}: limit must be a number above 0 ({RULES[name]})")
    return _Rule(limit, str(says))


def _allowed() -> str:
    return f"there are {', '.join(RULES)}"


def broken(rules: Mapping[str, _Rule], figures: Mapping[str, float | None]) -> Iterator[str]:
    """Yield what the site says of figures that reach its limits; None is unknown."""
    for name, rule in rules.items():
        value = figures.get(name)
        if value is not None and value >= rule.limit:
            yield f"{rule.says} ({name}: {value:.3g} {RULES[name]}, limit {rule.limit:g})"
