"""The Python environment as one file, which each node of a job unpacks once into its own disk.

    runs/environments/3fa92c1be0d44c12.tar    the name is a digest of its files' names, sizes, times
        parts                                 where its folders and its parts begin, and the end
        environment/…                         sys.prefix: a virtual or a conda environment
        base/…                                the Python under a virtual environment, unless in /usr
    runs/environments/code-8b1d….tar          a code snapshot, which changes more often

A start opens thousands of files and asks for ten times as many. A shared file system answers each
question over the network, and a thousand nodes ask at the same time. One file is read by large
reads. `environment.sh` is what a rank does with it: processes unpack the parts side by side.

A folder from which nothing is imported (headers, icons, web pages), and one of tests, stays where
it is: the copy has a link to it. Half of the files of an environment are in such folders.
"""

import io
import os
import stat
import sys
import tarfile
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from multiprocessing.pool import ThreadPool
from pathlib import Path

import xxhash

from hpctrain.base.errors import ConfigError, StorageError
from hpctrain.base.files.disk import temporary
from hpctrain.base.terminal.progress_bar import ProgressBar

FOLDER = "environments"
"""The folder of the archives in `output_dir`."""

SHELL = Path(__file__).with_suffix(".sh")
"""The shell script by which ranks run the Python of an archive; its head has its arguments."""

_ENVIRONMENT, _BASE = "environment", "base"
# No training imports them.
_SELDOM = {"test", "tests", "idlelib", "tkinter", "ensurepip", "turtledemo"}
_ASKED_AT_ONCE = 16  # folders and files of a slow file system
_AHEAD, _SMALL = 256, 1 << 20  # files that are read before they are written, and bytes of each
_PARTS = 8  # environment.sh starts so many processes
_FILE_COST = 1 << 16  # bytes that are written in the time in which a file is created
_BLOCK = 512  # of a tar

_Item = tuple[str, tuple[Path, os.stat_result]]
_Files = dict[str, tuple[Path, os.stat_result]]  # by the name in the archive
_TYPES = {
    stat.S_IFREG: tarfile.REGTYPE,
    stat.S_IFDIR: tarfile.DIRTYPE,
    stat.S_IFLNK: tarfile.SYMTYPE,
}


def image(output_dir: str | Path) -> Path:
    """Return the path of the archive of this process's environment, which need not exist yet.

    A Python that is no environment is a ConfigError.
    """
    if sys.prefix == "/usr":
        raise ConfigError(
            f"launch.environment=image: {sys.executable} is the Python of the system, which stays "
            "where it is: use a virtual or conda environment, or launch.environment=shared"
        )
    return Path(os.path.abspath(output_dir)) / FOLDER / f"{_digest()}.tar"


def write(path: Path, code: Path | None) -> None:
    """Write the archive `path` of the environment, and that of a code snapshot, if they are new.

    A file that cannot be read or written is a StorageError.
    """
    _pack(path, _environment, "launch.environment: ")
    if code is not None:
        # environment.sh knows this name.
        _pack(path.with_name(f"code-{code.name}.tar"), partial(_files, code, ""), "code: ")


def code_folder(output_dir: str | Path, pythonpath: Sequence[Path]) -> Path | None:
    """Return the folder of the code snapshot that Python imports from; None if there is none."""
    top = Path(os.path.abspath(output_dir)) / "code"
    inside = (path.relative_to(top) for path in pythonpath if path.is_relative_to(top))
    return next((top / path.parts[0] for path in inside), None)


@cache  # what the digest is of is what travels
def _environment() -> _Files:
    files = _files(Path(sys.prefix), _ENVIRONMENT)
    base = Path(sys.base_prefix)
    if base != Path(sys.prefix) and not base.is_relative_to("/usr"):
        files |= _files(base, _BASE)
    # What is imported, what Python asks of each package, and the programs.
    needed = {f"{_ENVIRONMENT}/bin", f"{_BASE}/bin", _ENVIRONMENT, _BASE}
    for name in files:
        folder, _, file = name.rpartition("/")
        is_code = file.endswith((".py", ".pyc")) or ".so" in file or folder.endswith(".dist-info")
        if is_code and not _SELDOM & {*folder.split("/")}:
            while folder not in needed:
                needed.add(folder)
                folder = folder.rpartition("/")[0]
    return {name: file for name, file in files.items() if name.rpartition("/")[0] in {"", *needed}}


@cache
def _digest() -> str:
    hashed = xxhash.xxh3_128(sys.executable.encode())
    for name, (_, facts) in sorted(_environment().items()):
        hashed.update(f"{name}\0{facts.st_size} {facts.st_mtime_ns}\0".encode("utf-8", "replace"))
    return hashed.hexdigest()[:16]


def _files(root: Path, name: str) -> _Files:
    """Return what is below a folder that has this name in the archive; "" is a code snapshot."""
    found: _Files = {}
    folders = [(root, name)]
    with ThreadPool(_ASKED_AT_ONCE) as pool:
        while folders:
            level, folders = pool.map(partial(_entries, name), folders), []
            for each in level:
                found |= each
                folders += [(p, n) for n, (p, facts) in each.items() if stat.S_ISDIR(facts.st_mode)]
    return found


def _entries(top: str, folder: tuple[Path, str]) -> _Files:
    path, inside = folder
    found = {}
    try:
        with os.scandir(path) as entries:
            for entry in entries:
                name = f"{inside}/{entry.name}".lstrip("/")
                if top != _BASE or _travels(name):
                    facts = entry.stat(follow_symlinks=False)
                    if stat.S_IFMT(facts.st_mode) in _TYPES:  # nothing imports a socket
                        found[name] = Path(entry.path), facts
    except OSError as error:
        raise _unreadable(error) from error
    return found


def _travels(name: str) -> bool:
    """Return whether the Python below needs a file or folder."""
    _, kind, *inside = name.split("/")
    if kind == "bin":
        return not inside or inside[0].startswith("python")
    if kind != "lib" or not inside:  # what compiles reads the headers, by a link
        return kind == "lib" or (kind == "include" and not inside)
    return (inside[0].startswith("python") and "site-packages" not in inside[1:-1]) or (
        ".so" in inside[0]
    )


def _pack(path: Path, listed: Callable[[], _Files], label: str) -> None:
    try:
        os.utime(path)  # `gc` deletes what was not used for long
    except FileNotFoundError:
        pass
    except PermissionError:
        return  # a colleague's
    except OSError as error:
        raise _unreadable(error) from error
    else:
        return
    files, unfinished = listed(), temporary(path)
    total = sum(facts.st_size for _, facts in files.values())
    part = (total + _FILE_COST * len(files)) / _PARTS
    folders = {name.rpartition("/")[0] for name in files}
    # Folders come first: they are there before processes unpack the parts side by side.
    order = sorted(files.items(), key=lambda item: (item[0] not in folders, item[0]))
    begins, cost = list[int](), 0.0
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with (
            unfinished.open("xb", buffering=_SMALL) as output,  # few writes: each may take long
            tarfile.TarFile(fileobj=output, mode="w", copybufsize=_SMALL) as tar,
            ThreadPool(_ASKED_AT_ONCE) as pool,
            ProgressBar(len(files), total, label=label, noun="files") as bar,
        ):
            head = tarfile.TarInfo("parts")
            head.size = _BLOCK
            tar.addfile(head, io.BytesIO(bytes(_BLOCK)))
            begins.append(tar.offset)
            for (name, (full, facts)), content in _read_ahead(pool, order):
                if name not in folders and cost >= part * (len(begins) - 1):
                    begins.append(tar.offset)
                member = _member(full, name, facts, is_link=name not in folders)
                if member.isreg() and content is None:
                    with full.open("rb") as file:
                        _check_size(full, facts, os.fstat(file.fileno()).st_size)
                        tar.addfile(member, file)
                else:
                    tar.addfile(member, io.BytesIO(content or b""))
                cost += (name not in folders) * (facts.st_size + _FILE_COST)
                bar.advance(1, facts.st_size)
            begins.append(tar.offset)
        with unfinished.open("r+b") as written:
            written.seek(_BLOCK)  # behind the head
            written.write(" ".join(map(str, begins)).encode() + b"\n")
        unfinished.replace(path)
    except OSError as error:
        raise _unreadable(error) from error
    finally:
        unfinished.unlink(missing_ok=True)


def _read_ahead(pool: ThreadPool, order: list[_Item]) -> Iterator[tuple[_Item, bytes | None]]:
    """Yield each file with what it holds, or None if it is large or no regular file."""
    for begin in range(0, len(order), _AHEAD):
        batch = order[begin : begin + _AHEAD]
        yield from zip(batch, pool.map(_content, batch, chunksize=1), strict=True)


def _content(item: _Item) -> bytes | None:
    full, facts = item[1]
    if not stat.S_ISREG(facts.st_mode) or facts.st_size >= _SMALL:
        return None
    with full.open("rb", buffering=facts.st_size + 2) as file:  # one read, whatever a block is
        content = file.read(facts.st_size + 1)
    _check_size(full, facts, len(content))
    return content


def _check_size(full: Path, facts: os.stat_result, size: int) -> None:
    if size != facts.st_size:
        raise StorageError(
            f"launch.environment=image: {full} changes while it is packed (it had "
            f"{facts.st_size:,} bytes, now {size:,}): submit again when nothing is being installed"
        )


def _member(full: Path, name: str, facts: os.stat_result, is_link: bool) -> tarfile.TarInfo:
    """Return the head of a file, or of a folder, which may be a link to what stays.

    A hard link is a file of its own: the other name may be in another part.
    """
    member = tarfile.TarInfo(name)
    member.mode, member.mtime = facts.st_mode, facts.st_mtime
    member.type = _TYPES[stat.S_IFMT(facts.st_mode)]
    if member.isreg():
        member.size = facts.st_size
    elif member.isdir():
        member.mode |= stat.S_IRWXU  # another part may have files of it
        if is_link:
            member.type, member.linkname = tarfile.SYMTYPE, str(full)
    else:
        member.linkname = _target(full, name)
    return member


def _target(link: Path, name: str) -> str:
    """Return where a link points to in the copy: a path into what travels becomes relative."""
    target = os.readlink(link)
    if not os.path.isabs(target):
        return target
    for root, inside in ((sys.prefix, _ENVIRONMENT), (sys.base_prefix, _BASE)):
        for folder in (root, os.path.realpath(root)):
            if Path(target).is_relative_to(folder):
                there = os.path.join(inside, os.path.relpath(target, folder))
                return os.path.relpath(there, os.path.dirname(name))
    return target


def _unreadable(error: OSError) -> StorageError:
    return StorageError(f"launch.environment=image: {error.filename}: {error.strerror}")
