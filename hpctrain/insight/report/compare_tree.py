"""`report --compare RUN RUN`: what differs between two runs, and the first step they part.

Two runs differ in their config, code, data and packages, and in the numbers that they report.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hpctrain.base.errors import ConfigError
from hpctrain.base.files.disk import text_of
from hpctrain.base.files.yaml_file import flat
from hpctrain.insight.report.account.run_account import RunAccount, read
from hpctrain.insight.report.tree import Fact, Pairs, Rows, Section, Sentences
from hpctrain.runs.code import provenance

# Keys that say where a run is and how it is called, not what it does.
_PLACES = ("output_dir", "name")


def compared(paths: Sequence[Path]) -> tuple[str, list[Section]]:
    """Return a title, and what differs between two runs; other paths are a ConfigError."""
    if len(paths) != 2:
        names = ", ".join(path.name for path in paths[:5]) + ", ..." * (len(paths) > 5)
        raise ConfigError(f"--compare: it takes two runs, and got {names}")
    left, right = read(paths)
    for account in (left, right):
        if damage := account.facts.damage or ("" if account.config else account.left_out[0]):
            raise ConfigError(f"{account.name} cannot be compared: {damage}")
    return f"{left.name} and {right.name}", _tree(left, right)


def _tree(left: RunAccount, right: RunAccount) -> list[Section]:
    """Return what differs between two runs, and where they part."""
    left_out: list[str] = []
    config = differing(flat(left.config), flat(right.config))
    data = [each.facts.record.data_digest or "unknown" for each in (left, right)]
    folders = [each.facts.path / "provenance" for each in (left, right)]
    code = _code(folders[0], folders[1], left_out)
    versions = [_versions(text_of(folder / "packages.txt")) for folder in folders]
    packages = differing(versions[0], versions[1]) if all(versions) else {}
    if not all(versions):
        left_out.append("packages: a run has no record of them (it has not begun)")
    partings, last, shared = _metrics(left, right)
    if not shared:
        left_out.append(
            "metrics: the runs report none at the same step (train.log_every, train.eval_every)"
        )
    told = f"The runs do not part: all metrics are equal at the {shared:,} common steps."
    if partings:
        first = partings[0]
        told = (
            f"The runs part at step {first['step']:,}: {first['metric']} is {first['left']:.9g} "
            f"and {first['right']:.9g}."
        )
    elif not shared:
        told = "It is not known where the runs part: they have no step in common."
    names = [left.name, right.name]
    differ = [f"the data sets have other contents: {data[0]} and {data[1]}"]
    digits = {name: (f"{a:.6g}", f"{b:.6g}") for name, (a, b) in last.items()}
    return [
        Pairs(
            "",
            [
                Fact("runs", names),
                Fact("config", config),
                Fact("packages", packages),
                Fact("metrics", last),
                Fact("partings", partings),
                Fact("shared", shared),
            ],
        ),
        _table("Config", names, config),
        Sentences("Code", "code", code),
        Sentences("Data", "data", differ if data[0] != data[1] else []),
        _table("Packages", names, packages),
        _table("Metrics at the end", names, digits),
        Sentences("Left out", "left_out", left_out),
        Sentences("", "", ["What is not shown here is the same.", told]),
    ]


def _table(title: str, names: list[str], rows: Mapping[str, tuple[Any, Any]]) -> Rows:
    shown = [[key, *("-" if v is None else str(v) for v in both)] for key, both in rows.items()]
    return Rows.of(title, ["key", *names], shown)


def differing(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return both values by key, where they differ; None where there is no such key."""
    return {
        key: (a.get(key), b.get(key))
        for key in sorted({*a, *b})
        if a.get(key) != b.get(key) and key not in _PLACES
    }


def _code(left: Path, right: Path, left_out: list[str]) -> list[str]:
    """Return sentences about commits and changes that are not committed."""
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
            commits = (f"{each.commit[:10] or 'none'} ({each.branch})" for each in (a, b))
            found.append(f"{name}: commit {' and '.join(commits)}")
        old, new = (folder / f"{name}.diff" for folder in (left, right))
        if text_of(old) != text_of(new):
            found.append(f"{name}: the changes that are not committed differ: `diff {old} {new}`")
    return found


def _versions(text: str) -> dict[str, str]:
    lines = text.replace("# Python ", "Python==", 1).splitlines()
    pairs = (line.partition("==")[::2] for line in lines)
    return {name: version.split()[0] for name, version in pairs if version}


def _metrics(
    left: RunAccount, right: RunAccount
) -> tuple[list[dict[str, Any]], dict[str, tuple[float, float]], int]:
    """Return where each shared metric first differs, the last values, and the common steps."""
    a, b = left.history.metrics, right.history.metrics
    partings, last, steps = [], {}, set[int]()
    for name in sorted(name for name in {*a} & {*b} if not name.startswith("perf/")):
        last[name] = (a[name].last(), b[name].last())
        values = dict(zip(b[name].steps, b[name].values, strict=True))
        for step, value in zip(a[name].steps, a[name].values, strict=True):
            if step not in values:
                continue
            steps.add(step)
            other = values[step]
            if value != other and not (math.isnan(value) and math.isnan(other)):
                partings.append({"metric": name, "step": step, "left": value, "right": other})
                break
    # At one step the loss says more than what follows from it.
    partings.sort(key=lambda each: (each["step"], each["metric"] != "train/loss", each["metric"]))
    return partings, last, len(steps)
