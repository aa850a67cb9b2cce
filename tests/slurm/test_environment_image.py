"""An environment that travels: the archive, and the shell text by which ranks run its Python."""

import fcntl
import os
import shlex
import subprocess
import sys
import time
import venv
from pathlib import Path

import pytest

from hpctrain.addons.node import environment
from hpctrain.config.job_request import JobRequest
from hpctrain.config.schema import Config, LaunchConfig
from hpctrain.errors import StorageError
from hpctrain.insight.shell import tools
from hpctrain.launch.entry import Entry
from hpctrain.launch.executors import SlurmExecutor
from hpctrain.launch.sweeps.submission import LOCK, Submitter
from hpctrain.runs.run_dir import RunDir

HERE = Path(__file__).parents[2]
SHELL = environment.SHELL
PACK = """
import sys
sys.path[:0] = {path!r}
from pathlib import Path
from hpctrain.addons.node import environment
image = environment.image("out")
environment.write(image, Path("code/abc"))
print(image)
"""
WHERE = "import os, sys, mine, moved; print(sys.prefix, os.__file__, mine.__file__, moved.__file__)"


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a small environment, a copy of code, and their archives in `out`."""
    folder = tmp_path_factory.mktemp("packed")
    venv.create(folder / "env", with_pip=False)
    (installed,) = (folder / "env/lib").glob("python3*/site-packages")
    (installed / "mine.py").write_text("")
    for kind, file in (("icons", "one.svg"), ("tests", "__init__.py"), ("part", "__init__.py")):
        (installed / "package" / kind).mkdir(parents=True)
        (installed / "package" / kind / file).write_text("known = 42")
    (folder / "code/abc/project").mkdir(parents=True)
    (folder / "code/abc/project/moved.py").write_text("")
    (folder / "code/abc/base/src").mkdir(parents=True)  # a project may have this name, too
    (folder / "code/abc/base/src/data.txt").write_text("")
    script = PACK.format(path=[str(HERE), *(p for p in sys.path if p.endswith("site-packages"))])
    subprocess.run([folder / "env/bin/python", "-c", script], cwd=folder, check=True)
    return folder


def archive(packed: Path) -> Path:
    """Return the archive of the environment, whose name is a digest."""
    (image,) = {*packed.glob("out/environments/*.tar")} - {*packed.glob("out/*/code-*.tar")}
    return image


def start(packed: Path, node: Path, program: str = WHERE, *arguments: str) -> subprocess.Popen[str]:
    """Start a rank on a node whose own disk is a folder."""
    image = archive(packed)
    code, python = packed / "code/abc", packed / "env/bin/python"
    node.mkdir(exist_ok=True)
    return subprocess.Popen(
        ["bash", str(SHELL), str(image), str(code), str(python), "-c", program, *arguments],
        env={"PATH": os.environ["PATH"], "TMPDIR": str(node), "PYTHONPATH": str(code / "project")},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def copies(node: Path) -> list[Path]:
    """Return what has been unpacked on a node."""
    return sorted(p for p in node.glob("hpctrain-*/*") if p.is_dir())


def test_the_batch_script_starts_every_python_by_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hpctrain.addons.node.environment._digest", lambda: "1")
    config = Config(name="a", output_dir="/runs", launch=LaunchConfig(environment="image"))
    code = Path("/runs/code/abc")
    executor = SlurmExecutor(Path("/x y"), JobRequest.of(config), pythonpath=[code / "project"])
    image = "/runs/environments/1.tar"
    words = shlex.join(["bash", "/x y/environment.sh", image, str(code), sys.executable])
    assert executor.text().count(words) == 2  # that of the ranks, and of the verdict
    assert f"{words} -u -m hpctrain run" in executor.text()


def test_it_is_packed_before_other_submissions_must_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    locked = []

    def write(image: Path, code: Path | None) -> None:
        locked.append((image.parent.parent / LOCK).exists())
        raise StorageError("the disk is full")

    monkeypatch.setattr(environment, "_digest", lambda: "1")
    monkeypatch.setattr(environment, "write", write)
    config = Config(output_dir=str(tmp_path), launch=LaunchConfig(environment="image"))
    entry = Entry([], config, RunDir(tmp_path / "a-1"))
    with pytest.raises(StorageError):
        Submitter(tmp_path / "sweep", [entry], cluster=True).queue([entry])
    assert locked == [False]


def test_all_that_a_rank_imports_is_on_the_node(packed: Path, tmp_path: Path) -> None:
    out, err = start(packed, tmp_path).communicate()
    assert err == ""
    assert all(path.startswith(f"{tmp_path}/hpctrain-") for path in out.split()), out
    assert not (packed / "env").samefile(out.split()[0])
    (code,) = (path for path in copies(tmp_path) if path.name.startswith("code-"))
    assert (code / "base/src/data.txt").exists()


def test_the_interpreter_below_travels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("env/pyvenv.cfg", "base/bin/python3", "base/lib/python3.11/os.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "env"))
    monkeypatch.setattr(sys, "base_prefix", str(tmp_path / "base"))
    assert "base/bin/python3" in environment._environment.__wrapped__()


def test_an_archive_of_a_colleague_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def utime(path: Path) -> None:
        raise PermissionError(path)

    monkeypatch.setattr(os, "utime", utime)
    environment.write(tmp_path / "1.tar", None)
    assert not (tmp_path / "1.tar").exists()


def test_what_nobody_imports_stays_and_is_there_by_a_link(packed: Path, tmp_path: Path) -> None:
    program = (
        "import pathlib, sysconfig, mine\n"
        "from package.tests import known\n"
        "for here in (pathlib.Path(mine.__file__).parent / 'package', pathlib.Path(sysconfig."
        "get_path('stdlib')), pathlib.Path(sysconfig.get_path('include')).parent):\n"
        "    print(*sorted(p.name for p in here.iterdir() if p.is_symlink() and p.exists()))\n"
        "print(known, (here / 'site-packages').exists())"
    )
    out, err = start(packed, tmp_path, program).communicate()
    assert err == ""
    own, below, _, said = out.splitlines()
    assert own == "icons tests"
    assert {"test", "idlelib", "site-packages"} <= {*below.split()} or "/usr" in sys.base_prefix
    assert said.startswith("42")


def test_a_shell_has_the_python_of_the_node(packed: Path, tmp_path: Path) -> None:
    words = tools.Tool("shell").words(["bash", "environment.sh"], None)
    shell = start(packed, tmp_path, *words[3:])
    out, _ = shell.communicate(f"type python; python -c '{WHERE}'\n")
    assert out.count(f"{tmp_path}/hpctrain-") == 5, out


def test_many_ranks_unpack_it_once(packed: Path, tmp_path: Path) -> None:
    ranks = [start(packed, tmp_path, f"{WHERE}; sys.stdout.flush(); input()") for _ in range(4)]
    assert len({rank.stdout.readline() for rank in ranks if rank.stdout}) == 1  # all of them live
    for rank in ranks:
        rank.communicate("\n")
    assert len(copies(tmp_path)) == 2  # the environment and the code
    before = [path.stat().st_mtime_ns for path in copies(tmp_path)]
    start(packed, tmp_path).communicate()
    assert [path.stat().st_mtime_ns for path in copies(tmp_path)] == before


def test_a_copy_that_a_killed_rank_has_left_is_made_again(packed: Path, tmp_path: Path) -> None:
    start(packed, tmp_path).communicate()
    environment = next(path for path in copies(tmp_path) if not path.name.startswith("code-"))
    (environment / "unpacked").unlink()
    next(environment.glob("environment/lib/*/site-packages/mine.py")).unlink()
    out, err = start(packed, tmp_path).communicate()
    assert err == ""
    assert str(environment) in out


def test_a_copy_without_its_python_is_not_used(packed: Path, tmp_path: Path) -> None:
    start(packed, tmp_path).communicate()
    next(tmp_path.glob("hpctrain-*/*/environment/bin/python")).unlink()
    out, err = start(packed, tmp_path).communicate()
    assert out.startswith(str(packed / "env"))
    assert "there is no program" in err


def test_old_copies_leave_unless_a_process_uses_them(packed: Path, tmp_path: Path) -> None:
    own = tmp_path / f"hpctrain-{os.getuid()}"
    own.mkdir(mode=0o700)
    for name in ("unused", "used", "young"):
        (own / name).mkdir()
        (own / f"{name}.lock").touch()
        if name != "young":
            os.utime(own / f"{name}.lock", (time.time() - 4 * 86400,) * 2)
    with (own / "used.lock").open() as held:
        fcntl.flock(held, fcntl.LOCK_SH)
        start(packed, tmp_path).communicate()
    assert {path.name for path in copies(tmp_path)} >= {"used", "young"}
    assert not (own / "unused").exists()


def test_a_rank_holds_the_lock_of_its_copy(packed: Path, tmp_path: Path) -> None:
    rank = start(packed, tmp_path, "print(1, flush=True); input()")
    assert rank.stdout is not None
    assert rank.stdout.readline() == "1\n"
    for lock in tmp_path.glob("hpctrain-*/*.lock"):
        with lock.open() as file, pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    rank.terminate()
    rank.communicate()


def test_a_folder_of_somebody_else_is_not_used(packed: Path, tmp_path: Path) -> None:
    if os.getuid():
        pytest.skip("only root can give a folder away")
    theirs = tmp_path / f"hpctrain-{os.getuid()}"
    theirs.mkdir()
    os.chown(theirs, 65534, 65534)
    out, err = start(packed, tmp_path).communicate()
    assert out.startswith(str(packed / "env"))
    assert f"launch.environment=image: {theirs} cannot have a copy" in err
    assert not copies(tmp_path)


def test_without_room_the_ranks_start_from_the_shared_files(packed: Path, tmp_path: Path) -> None:
    (packed / "full.sh").write_text(f'ulimit -f 100\nexec bash {SHELL} "$@"\n')
    image = archive(packed)
    words = [image, packed / "code/abc", packed / "env/bin/python", "-c", "import mine, moved"]
    done = subprocess.run(
        ["bash", packed / "full.sh", *words],
        env={"PATH": os.environ["PATH"], "TMPDIR": str(tmp_path), "PYTHONPATH": "code/abc/project"},
        cwd=packed,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "this process starts from the shared file system" in done.stderr
    assert not copies(tmp_path)
