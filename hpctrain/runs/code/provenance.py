"""The provenance of a run, in its directory: git repositories, changes, installed packages.

provenance/
    git.json         one entry per working tree: path, commit, branch, dirty, remote
    NAME.diff        the changes in a working tree since the commit, a patch for `git apply`
    packages.txt     Python and the installed packages, in the format of `pip freeze`
"""

import functools
import json
import os
import platform
import subprocess
import sys
import sysconfig
from collections import Counter
from collections.abc import Mapping
from fnmatch import fnmatchcase
from importlib.metadata import distributions
from pathlib import Path
from urllib.parse import unquote, urlsplit

from hpctrain.base.errors import ConfigError
from hpctrain.base.files.disk import set_aside, text_of
from hpctrain.base.files.record import Record, read_known, written
from hpctrain.base.secrets import mask, without_credentials

# Files that hold secrets by custom: they are in no copy of the code and in no patch.
_PRIVATE = (
    *(".env", ".env.*", ".netrc", ".pgpass", ".git-credentials", ".pypirc", ".htpasswd"),
    *("id_rsa", "id_dsa", "id_ecdsa", "id_ecdsa_sk", "id_ed25519", "id_ed25519_sk"),
    *("*.pem", "*.key", "*.p12", "*.pfx", "*.ppk", "*.jks", "*.keystore", "*.kdbx"),
)
_TEMPLATES = (".env.example", ".env.sample", ".env.template", ".env.dist")


class Tree(Record, frozen=True):
    """A working tree in `git.json`; `commit` is "" before the first commit, and outside of git."""

    path: str
    commit: str = ""
    branch: str = ""
    dirty: bool = False
    remote: str = ""


class Repo:
    """The working tree of a git repository, with a name that no other one of this process has.

    Python imports from the folders in it that are `used`.
    """

    def __init__(self, root: Path, used: list[Path], name: str = "") -> None:
        self.root, self.used, self.name = root, used, name

    def files(self) -> dict[str, bool]:
        """Return the paths of the code's files, relative to the root, and whether git tracks them.

        These are all tracked files, also of submodules, new files that are not ignored, and ignored
        modules in the same folders (`_version.py`, compiled extensions), without which imports
        would fail. Another repository inside is a name with a slash at its end.
        """
        folders = [os.path.relpath(folder, self.root) for folder in self.used]
        others = ("ls-files", "-z", "--others", "--exclude=*.pyc", "--exclude-standard")
        modules = [f":(glob){folder}/**/*.{end}" for folder in folders for end in ("py", "so")]
        tracked = self._git("ls-files", "-z", "--cached", "--recurse-submodules").split("\0")
        new = self._git(*others, "--", *folders).split("\0")
        ignored = self._git(*others, "--ignored", "--directory", "--", *modules).split("\0")
        # A name with a slash at its end is a folder that is ignored as a whole.
        new += [name for name in ignored if not name.endswith("/")]
        names = dict.fromkeys(new, False) | dict.fromkeys(tracked, True)
        names.pop("", None)
        return dict(sorted(names.items()))

    def facts(self) -> Tree:
        """Return the entry for `git.json`."""
        status = self._git("status", "--porcelain", "--untracked-files=no")
        try:
            commit, branch = self._git("rev-parse", "HEAD", "--abbrev-ref", "HEAD").split()
        except ConfigError:
            commit, branch = "", ""  # nothing was committed yet
        url = "".join(self._git("remote", "-v").split()[1:2])
        remote = mask(without_credentials(url))
        return Tree(str(self.root), commit, branch, bool(status), remote)

    def diff(self) -> str:
        """Return the changes since the commit as a patch, without secrets; "" without a commit."""
        without = [f":(exclude,glob)**/{name}" for name in _PRIVATE]
        options = ("--no-ext-diff", "--no-color", "--binary")
        try:
            changes = self._git("diff", *options, "HEAD", "--", ".", *without)
        except ConfigError:
            return ""
        return mask(changes)

    def _git(self, *arguments: str) -> str:
        command = ["git", "-C", str(self.root), *arguments]
        # Inside a git hook there are variables of another repository, which git would use.
        env = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
        try:
            done = subprocess.run(command, capture_output=True, env=env, check=True)
        except (FileNotFoundError, subprocess.CalledProcessError) as error:
            said = os.fsdecode(getattr(error, "stderr", b"git is not on the PATH"))
            raise ConfigError(
                f"launch.snapshot: git cannot read {self.root} ({' '.join(said.split())}); "
                "launch.snapshot=off works without it"
            ) from error
        return os.fsdecode(done.stdout)


def code_folders() -> list[Path]:
    """Return the folders that Python imports from, without those of installed packages."""
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
    """Return the working trees that contain these folders, and the folders that are in none.

    The name of a working tree is the name of its folder; if another has this name, `NAME.2`, ….
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


@functools.cache
def _editable() -> list[str]:
    """Return the folders of the packages that `pip install -e` has installed."""
    found = []
    for package in distributions():
        text = package.read_text("direct_url.json")
        about = json.loads(text) if text else {}
        if about.get("dir_info", {}).get("editable"):
            folder = unquote(urlsplit(about["url"]).path)
            found += [folder, os.path.join(folder, "src")]
    return found


def is_private(name: str) -> bool:
    """Return whether a file holds secrets, by its name."""
    return name not in _TEMPLATES and any(fnmatchcase(name, pattern) for pattern in _PRIVATE)


@functools.cache
def collect() -> Mapping[str, str]:
    """Return the content of each file, by name, for the code and environment of this process."""
    content = {"packages.txt": packages()}
    repos, outside = repositories(code_folders())
    here = Path(os.path.realpath(os.getcwd()))
    # A project in no git stands before the trees of what it uses: their commits are not its own.
    facts = [Tree(str(here))] if here in outside else []
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


def origin(folder: Path) -> tuple[str, str]:
    """Return where the code of the first working tree is from, and its commit.

    That is its remote, or else its path; "" if none was recorded. The commit has `-dirty` if there
    are changes; it is "" in no git.
    """
    for tree in trees(folder):
        return tree.remote or tree.path, tree.commit + "-dirty" * tree.dirty
    return "", ""


def trees(folder: Path) -> tuple[Tree, ...]:
    """Return the working trees of a provenance folder; none if they were not recorded."""
    return read_known(tuple[Tree, ...], folder / "git.json", parts=2) or ()
