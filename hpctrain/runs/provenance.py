"""Where a run comes from, kept in its directory: commits, changes, installed packages.

provenance/
    git.json         one entry a working tree: path, commit, branch, dirty, remote
    NAME.diff        its changes since the commit; `git apply` takes them
    packages.txt     Python and the installed packages, as `pip freeze` writes them
"""

from __future__ import annotations

import functools
import json
import os
import platform
import sys
from collections.abc import Mapping
from pathlib import Path

from hpctrain.disk import set_aside
from hpctrain.errors import ConfigError
from hpctrain.runs.git import code_folders, repositories


@functools.cache
def collect() -> Mapping[str, str]:
    """The files' contents by name, for this process's code and environment."""
    content = {"packages.txt": packages()}
    facts = []
    repos, _ = repositories(code_folders())
    for repo in repos:
        try:
            facts.append(repo.facts())
            changes = repo.diff()
        except ConfigError:
            continue  # no git here, or it refuses (safe.directory): nothing to know
        if changes:
            content[f"{repo.name}.diff"] = changes
    return content | {"git.json": json.dumps(facts, indent=1) + "\n"}


def store(folder: Path, content: Mapping[str, str], twin: Path | None = None) -> None:
    """Write the files into a run's provenance folder; one with other content is kept beside it.

    Args:
        folder: `RUN/provenance`.
        content: from `collect`.
        twin: another run's folder with this content, to share its files on disk.
    """
    if folder.is_dir():
        if all(_text(folder / name) == text for name, text in content.items()):
            return
        set_aside(folder)
    folder.mkdir(parents=True)
    for name, text in content.items():
        try:
            if twin is None:
                raise FileNotFoundError
            os.link(twin / name, folder / name)
        except OSError:  # no hard links on this file system
            (folder / name).write_text(text, errors="surrogateescape")


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="surrogateescape")
    except OSError:
        return ""


def packages() -> str:
    """`# Python 3.11.7 …` and a line `name==version` for each installed package, sorted."""
    found = set()
    for place in dict.fromkeys(sys.path):
        try:
            names = os.listdir(place or ".")
        except OSError:
            continue
        # Their names tell: opening each package's METADATA would take ten times as long.
        found |= {name for name in names if name.endswith(".dist-info")}
    lines = [name.removesuffix(".dist-info").replace("-", "==", 1) for name in found]
    head = f"# Python {platform.python_version()} {sys.executable} ({platform.platform()})"
    return "\n".join([head, *sorted(lines, key=str.lower)]) + "\n"


def changes(folder: Path) -> list[str]:
    """How Python and the packages here differ from those recorded in a provenance folder."""
    try:
        recorded = set((folder / "packages.txt").read_text().splitlines())
    except OSError:
        return []
    now = set(packages().splitlines())
    gone = [f"-{line.removeprefix('# ')}" for line in sorted(recorded - now)]
    return gone + [f"+{line.removeprefix('# ')}" for line in sorted(now - recorded)]


def commit(folder: Path) -> str:
    """The commit of the first working tree, with `-dirty` where it was changed; else empty."""
    try:
        first = json.loads((folder / "git.json").read_text())[0]
    except (OSError, ValueError, LookupError):
        return ""
    return str(first["commit"]) + ("-dirty" if first["dirty"] else "")
