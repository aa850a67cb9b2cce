"""What differs between two runs: their config, code, data and packages, and where they part."""

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpctrain.disk import text_of
from hpctrain.report.account.run_account import RunAccount
from hpctrain.runs.code import provenance
from hpctrain.runs.code.git import Tree
from hpctrain.runs.sweep_overrides import flat

# Keys that say where a run is and how it is called, not what it does.
_PLACES = ("output_dir", "name")
_MOST_LINES = 40  # of a difference between two working trees


@dataclass(frozen=True)
class _Parting:
    """The first step at which a metric of two runs is not the same number, and both values."""

    metric: str
    step: int
    left: float
    right: float


@dataclass
class Differences:
    """What differs between two runs."""

    # Both values by dotted key; None where there is no such key.
    config: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    code: list[str] = field(default_factory=list)  # sentences about commits and uncommitted changes
    data: list[str] = field(default_factory=list)  # sentences about the data sets
    # The versions of both by package.
    packages: dict[str, tuple[str | None, str | None]] = field(default_factory=dict)
    metrics: dict[str, tuple[float, float]] = field(default_factory=dict)  # the last values of both
    # Where a shared metric first differs, in the order of the steps.
    partings: list[_Parting] = field(default_factory=list)
    shared: int = 0  # steps at which both have reported training metrics
    left_out: list[str] = field(default_factory=list)  # what could not be compared, and why

    @property
    def parting(self) -> _Parting | None:
        """The first step at which the runs part; None if all that both report is equal."""
        return self.partings[0] if self.partings else None


def differences(left: RunAccount, right: RunAccount) -> Differences:
    """Compare two runs."""
    found = Differences()
    found.config = _config(left.config, right.config)
    found.data = _data(left, right)
    a, b = (each.facts.path / "provenance" for each in (left, right))
    found.code = _code(a, b, found.left_out)
    found.packages = _packages(a, b, found.left_out)
    _metrics(left, right, found)
    return found


def _config(left: Mapping[str, Any], right: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    a, b = flat(left), flat(right)
    return {
        key: (a.get(key), b.get(key))
        for key in sorted({*a, *b})
        if a.get(key) != b.get(key) and key not in _PLACES
    }


def _data(left: RunAccount, right: RunAccount) -> list[str]:
    a, b = (each.facts.record.data_digest for each in (left, right))
    if a == b:
        return []
    return [f"the data sets have other contents: {a or 'unknown'} and {b or 'unknown'}"]


def _code(left: Path, right: Path, left_out: list[str]) -> list[str]:
    trees = [
        {Path(each.path).name: each for each in provenance.trees(folder)}
        for folder in (left, right)
    ]
    if not all(trees):
        left_out.append("code: a run has no record of its commit (no git, or it has not begun)")
        return []
    found = []
    for name in sorted({*trees[0], *trees[1]}):
        a, b = (each.get(name) for each in trees)
        if a is None or b is None:
            found.append(f"{name}: only one of the runs used this working tree")
            continue
        if a.commit != b.commit:
            found.append(f"{name}: commit {_short(a)} and {_short(b)}")
        changes = [text_of(folder / f"{name}.diff") for folder in (left, right)]
        if changes[0] != changes[1]:
            found.append(f"{name}: the changes that are not committed differ")
            found += _lines(*changes)
    return found


def _short(tree: Tree) -> str:
    return f"{tree.commit[:10]} ({tree.branch})"


def _lines(left: str, right: str) -> list[str]:
    lines = difflib.unified_diff(left.splitlines(), right.splitlines(), lineterm="", n=0)
    some = [line for line in lines if not line.startswith(("---", "+++", "@@"))]
    more = [f"... {len(some) - _MOST_LINES} more lines"] if len(some) > _MOST_LINES else []
    return [f"  {line}" for line in some[:_MOST_LINES]] + more


def _packages(
    left: Path, right: Path, left_out: list[str]
) -> dict[str, tuple[str | None, str | None]]:
    a, b = (_versions(text_of(folder / "packages.txt")) for folder in (left, right))
    if not (a and b):
        left_out.append("packages: a run has no record of them (it has not begun)")
        return {}
    names = sorted({*a, *b})
    return {name: (a.get(name), b.get(name)) for name in names if a.get(name) != b.get(name)}


def _versions(text: str) -> dict[str, str]:
    found = {}
    for line in text.splitlines():
        if line.startswith("# Python "):
            found["Python"] = line.split()[2]
        elif "==" in line:
            name, _, version = line.partition("==")
            found[name] = version
    return found


def _metrics(left: RunAccount, right: RunAccount, found: Differences) -> None:
    a, b = left.history.metrics, right.history.metrics
    names = sorted(name for name in {*a} & {*b} if not name.startswith("perf/"))
    steps: set[int] = set()
    for name in names:
        found.metrics[name] = (a[name].last(), b[name].last())
        values = dict(zip(b[name].steps, b[name].values, strict=True))
        for step, value in zip(a[name].steps, a[name].values, strict=True):
            if step not in values:
                continue
            steps.add(step)
            other = values[step]
            if value != other and not (math.isnan(value) and math.isnan(other)):
                found.partings.append(_Parting(name, step, value, other))
                break
    found.shared = len(steps)
    # At one step the loss says more than what follows from it.
    found.partings.sort(key=lambda each: (each.step, each.metric != "train/loss", each.metric))
    if not steps:
        found.left_out.append(
            "metrics: the runs report none at the same step (train.log_every, train.eval_every)"
        )
