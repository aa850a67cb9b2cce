"""The provenance of a run, in its directory: commits, changes and installed packages.

provenance/
    git.json         one entry per working tree: path, commit, branch, dirty, remote
    NAME.diff        the changes in a working tree since the commit, a patch for `git apply`
    packages.txt     Python and the installed packages, in the format of `pip freeze`
"""

import functools
import os
import platform
import sys
from collections.abc import Mapping
from pathlib import Path

from hpctrain.base.files.disk import set_aside, text_of
from hpctrain.base.files.record import read_known, written
from hpctrain.errors import ConfigError
from hpctrain.runs.code.git import Tree, code_folders, repositories


@functools.cache
def collect() -> Mapping[str, str]:
    """Return the content of each file, by name, for the code and environment of this process."""
    content = {"packages.txt": packages()}
    facts = []
    repos, _ = repositories(code_folders())
    for repo in repos:
        try:
            facts.append(repo.facts())
            diff = repo.diff()
        except ConfigError:
            continue  # there is no git here, or it refuses to read the folder (safe.directory)
        if diff:
            content[f"{repo.name}.diff"] = diff
    return content | {"git.json": written(facts)}


def store(folder: Path, content: Mapping[str, str]) -> None:
    """Write the provenance folder of a run. A folder with other content is archived."""
    if folder.is_dir():
        if all(_text(folder / name) == text for name, text in content.items()):
            return
        set_aside(folder)
    folder.mkdir(parents=True)
    for name, text in content.items():
        (folder / name).write_text(text, errors="surrogateescape")


def take_over(folder: Path, source: Path) -> None:
    """Let a run have the provenance that its sweep has recorded for all runs, if it is there.

    Until a run starts, it has no folder of its own: clusters limit the number of files.
    """
    if content := {path.name: _text(path) for path in sorted(source.glob("*"))}:
        store(folder, content)


_text = functools.partial(text_of, errors="surrogateescape")


def packages() -> str:
    """Return a line `# Python 3.11.7 …` and a sorted line `name==version` for each package."""
    found = set()
    for place in dict.fromkeys(sys.path):
        try:
            names = os.listdir(place or ".")
        except OSError:
            continue
        # The folder's name has the version. Reading each METADATA would take ten times as long.
        found |= {name for name in names if name.endswith(".dist-info")}
    lines = [name.removesuffix(".dist-info").replace("-", "==", 1) for name in found]
    head = f"# Python {platform.python_version()} {sys.executable} ({platform.platform()})"
    return "\n".join([head, *sorted(lines, key=str.lower)]) + "\n"


def changes(folder: Path) -> list[str]:
    """Return the lines of packages.txt that differ between a provenance folder and this process.

    Recorded lines that are missing now begin with `-`, new lines with `+`.
    """
    recorded = set(text_of(folder / "packages.txt", parts=2).splitlines())
    if not recorded:
        return []
    now = set(packages().splitlines())
    gone = [f"-{line.removeprefix('# ')}" for line in sorted(recorded - now)]
    return gone + [f"+{line.removeprefix('# ')}" for line in sorted(now - recorded)]


def commit(folder: Path) -> str:
    """Return the commit of the first working tree, with `-dirty` if it has changes; "" if none."""
    return "".join(each.commit + "-dirty" * each.dirty for each in trees(folder)[:1])


def source(folder: Path) -> str:
    """Return where the code of the first working tree is from: its remote, or else its path.

    Without any working tree this is "hpctrain".
    """
    first = trees(folder)[:1]
    return first[0].remote or first[0].path if first else "hpctrain"


def trees(folder: Path) -> tuple[Tree, ...]:
    """Return the working trees of a provenance folder; none if they were not recorded."""
    return read_known(tuple[Tree, ...], folder / "git.json", parts=2) or ()
