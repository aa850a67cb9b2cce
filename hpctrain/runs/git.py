"""What git knows of the code: its repositories, their files, commit and changes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import sysconfig
from collections import Counter
from collections.abc import Iterator
from importlib.metadata import distributions
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from hpctrain.errors import ConfigError


class Repo:
    """A working tree.

    Args:
        root: its top folder.
        used: the folders in it that Python imports from.
        name: what it is called beside the others.
    """

    def __init__(self, root: Path, used: list[Path], name: str = "") -> None:
        self.root, self.used, self.name = root, used, name

    def files(self) -> list[str]:
        """Paths, relative to the root, of what the code consists of.

        Tracked files, whatever their state; new ones that are not ignored; and ignored modules
        beside them (`_version.py`, compiled extensions), without which imports would fail. The same
        of the repositories inside: submodules, and clones that are not ignored.
        """
        folders = [os.path.relpath(folder, self.root) for folder in self.used]
        others = ("ls-files", "-z", "--others", "--exclude-standard")
        modules = [f":(glob){folder}/**/*.{end}" for folder in folders for end in ("py", "so")]
        tracked = self._git("ls-files", "-z", "--cached")
        new = self._git(*others, "--", *folders)
        ignored = self._git(*others, "--ignored", "--directory", "--", *modules)
        # What has a bar at its end is a folder that is ignored as a whole.
        names = {name for name in ignored.split("\0") if not name.endswith("/")}
        for name in {*tracked.split("\0"), *new.split("\0")} - {""}:
            inner = self.root / name
            if inner.is_symlink() or not (inner / ".git").exists():
                names.add(name)
                continue
            used = [folder for folder in self.used if folder.is_relative_to(inner)]
            names |= {os.path.join(name, path) for path in Repo(inner, used or [inner]).files()}
        return sorted(names - {""})

    def facts(self) -> dict[str, Any]:
        """Commit, branch and what differs from them, for `git.json`."""
        status = self._git("status", "--porcelain", "--untracked-files=no")
        try:
            commit, branch = self._git("rev-parse", "HEAD", "--abbrev-ref", "HEAD").split()
        except ConfigError:
            commit, branch = "", ""  # nothing was committed yet
        return {
            "path": str(self.root),
            "commit": commit,
            "branch": branch,
            "dirty": bool(status),
            "remote": _without_password(self._git("remote", "-v").split("\n")[0]),
        }

    def diff(self) -> str:
        """Changes since the commit; `git apply` takes them."""
        try:
            return self._git("diff", "--no-ext-diff", "--no-color", "--binary", "HEAD")
        except ConfigError:
            return ""

    def _git(self, *arguments: str) -> str:
        command = ["git", "-C", str(self.root), *arguments]
        # Another repository's variables, set inside a git hook, would be obeyed.
        env = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
        try:
            done = subprocess.run(command, capture_output=True, env=env, check=True)
        except FileNotFoundError:
            raise ConfigError(
                f"launch.snapshot: git, which knows what the code in {self.root} consists of, is "
                "not on the PATH; launch.snapshot=off does without"
            ) from None
        except subprocess.CalledProcessError as error:
            said = " ".join(os.fsdecode(error.stderr).split())
            raise ConfigError(
                f"launch.snapshot: git cannot read {self.root} ({said}); launch.snapshot=off does "
                "without"
            ) from error
        return os.fsdecode(done.stdout)


def code_folders() -> list[Path]:
    """The folders that Python imports from, beside the installed packages: working copies."""
    installed = {os.path.realpath(path) for path in sysconfig.get_paths().values()}
    places = [os.getcwd(), *sys.path, *_editable()]
    folders = [Path(os.path.realpath(place)) for place in places]
    return [
        folder
        for folder in dict.fromkeys(folders)
        if folder.is_dir()
        and str(folder) not in installed
        and not {"site-packages", "dist-packages", "lib-dynload"} & set(folder.parts)
        and folder != Path(sys.executable).parent
    ]


def repositories(folders: list[Path]) -> tuple[list[Repo], list[Path]]:
    """The working trees that these folders lie in, and the folders that lie in none.

    A tree has the name of its folder, or where another has it already `NAME.2` and so on.
    """
    repos: dict[Path, Repo] = {}
    seen: Counter[str] = Counter()
    outside = []
    for folder in folders:
        root = next((p for p in (folder, *folder.parents) if (p / ".git").exists()), None)
        if root is None:
            outside.append(folder)
            continue
        if root not in repos:
            name = root.name or "root"
            seen[name] += 1
            repos[root] = Repo(root, [], name if seen[name] == 1 else f"{name}.{seen[name]}")
        repos[root].used.append(folder)
    return list(repos.values()), outside


def _editable() -> Iterator[str]:
    """Folders of the packages that are installed by `pip install -e`."""
    for package in distributions():
        text = package.read_text("direct_url.json")
        about = json.loads(text) if text else {}
        if about.get("dir_info", {}).get("editable"):
            folder = unquote(urlsplit(about["url"]).path)
            yield from (folder, os.path.join(folder, "src"))


def _without_password(remote: str) -> str:
    """`https://user:token@host/x` in git's list of remotes, less what is before the `@`."""
    return re.sub(r"//[^/@\s]*@", "//", "".join(remote.split()[1:2]))
