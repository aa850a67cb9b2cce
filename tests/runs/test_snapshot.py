"""The copy of the code that a job runs from, and the provenance of a run."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hpctrain.config.schema import LaunchConfig
from hpctrain.errors import ConfigError
from hpctrain.runs.code import provenance, snapshot
from hpctrain.runs.code.snapshot import Snapshot


def commit(folder: Path) -> None:
    shell = "git init -q . && git add . && git -c user.name=me -c user.email=me@x commit -qm one"
    subprocess.run(shell, shell=True, check=True, cwd=folder)


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with tracked, changed, new, ignored and generated files."""
    folder = tmp_path / "project"
    (folder / "pkg").mkdir(parents=True)
    (folder / "ignored").mkdir()
    files = {
        "pkg/__init__.py": "",
        "pkg/net.py": "WIDTH = 1\n",
        "pkg/gone.py": "",
        ".gitignore": "ignored/\n_version.py\n*.bin\n",
        "pkg/_version.py": "VERSION = 1\n",
        "ignored/other.py": "",
        "pkg/weights.bin": "x",
    }
    for name, text in files.items():
        (folder / name).write_text(text)
    monkeypatch.chdir(folder)
    commit(folder)
    (folder / "pkg/net.py").write_text("WIDTH = 2\n")
    (folder / "pkg/new.py").write_text("")
    (folder / "pkg/gone.py").unlink()
    provenance.collect.cache_clear()
    return folder


def take(folder: Path, output_dir: Path | None = None, **launch: Any) -> Snapshot | None:
    """Return the copy of the code of a job; `folder` is that of the test."""
    output_dir = output_dir or folder / "project" / "runs"
    return snapshot.take(LaunchConfig(**launch), str(output_dir), str(folder / "data"))


def taken_from(folder: Path, output_dir: Path | None = None, **launch: Any) -> Snapshot:
    taken = take(folder, output_dir, **launch)
    assert taken is not None
    return taken


def test_the_snapshot_holds_the_code_as_it_is_typed(project: Path, tmp_path: Path) -> None:
    (project / "runs").mkdir()
    (project / "runs" / "result.txt").write_text("not code")
    taken = taken_from(tmp_path)
    assert not taken.path.exists()
    assert taken.write()
    assert not taken.write()
    copy = taken.path / "project"
    names = {str(p.relative_to(copy)) for p in copy.rglob("*") if p.is_file()}
    assert names == {
        *("pkg/__init__.py", "pkg/net.py", "pkg/new.py", "pkg/_version.py", ".gitignore")
    }
    assert (copy / "pkg/net.py").read_text() == "WIDTH = 2\n"
    assert copy in taken.pythonpath
    assert any((folder / "hpctrain" / "cli.py").exists() for folder in taken.pythonpath)
    # The same content gets the same name, and other content gets another name.
    again = taken_from(tmp_path)
    assert again.digest == taken.digest
    (project / "pkg/new.py").write_text("X = 1\n")
    other = taken_from(tmp_path)
    assert other.digest != taken.digest


def test_results_around_the_code_are_not_code(project: Path, tmp_path: Path) -> None:
    taken = taken_from(tmp_path, project)
    assert taken.write()
    (project / "run-12345678").mkdir()
    (project / "run-12345678" / "run.json").write_text("{}")
    (project / "sweeps" / "2026-01-31_x").mkdir(parents=True)
    (project / "sweeps" / "2026-01-31_x" / "job.sh").write_text("")
    again = taken_from(tmp_path, project)
    assert again.digest == taken.digest


def test_large_new_files_are_left_out_and_told(project: Path, tmp_path: Path) -> None:
    taken = taken_from(tmp_path)
    (project / "pkg/weights.npy").write_bytes(bytes(10_000_001))
    again = taken_from(tmp_path)
    assert (again.digest, taken.left_out) == (taken.digest, ())
    said = f"{project}/pkg/weights.npy (10 MB): `git add` it if the code needs it"
    assert again.left_out == (said,)
    subprocess.run(["git", "add", "pkg/weights.npy"], check=True)
    assert "project/pkg/weights.npy" in taken_from(tmp_path)._files


def test_too_much_code_is_refused_and_the_largest_named(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (project / "pkg" / "data.npy").write_bytes(bytes(3_000_000))
    monkeypatch.setattr(snapshot, "_LARGEST", 2e6)
    with pytest.raises(ConfigError, match=r"at most 2 MB, .*largest: .*data\.npy 3 MB"):
        take(tmp_path)
    assert take(tmp_path, snapshot="off") is None
    assert not (project / "runs").exists()


def test_a_folder_without_git_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text("")
    assert taken_from(tmp_path).unfrozen == (tmp_path,)
    provenance.collect.cache_clear()
    provenance.store(tmp_path / "provenance", provenance.collect())
    assert provenance.origin(tmp_path / "provenance") == (str(tmp_path), "")  # not ours


def test_provenance_names_commit_changes_and_packages(project: Path, tmp_path: Path) -> None:
    subprocess.run(
        ["git", "remote", "add", "origin", "https://me:s3cret@example.org/x.git"], check=True
    )
    content = provenance.collect()
    (facts,) = [repo for repo in json.loads(content["git.json"]) if repo["path"] == str(project)]
    assert len(facts["commit"]) == 40
    assert facts["dirty"]
    assert facts["remote"] == "https://example.org/x.git"
    assert "+WIDTH = 2" in content["project.diff"]
    assert "\nhydra_core==1." in content["packages.txt"]
    folder = tmp_path / "provenance"
    provenance.store(folder, content)
    provenance.store(folder, content)
    assert provenance.changes(folder) == []
    commit_then = facts["commit"] + "-dirty"
    assert provenance.origin(folder) == ("https://example.org/x.git", commit_then)
    assert provenance.origin(tmp_path / "absent") == ("", "")
    (folder / "packages.txt").write_text(
        content["packages.txt"].replace("\nhydra_core==", "\nhydra_core==0.")
    )
    assert [line[:13] for line in provenance.changes(folder)] == ["-hydra_core==", "+hydra_core=="]
    # Another state of the code is stored next to the first.
    provenance.store(folder, content)
    assert "hydra_core==0." in (tmp_path / "provenance.1" / "packages.txt").read_text()


def test_no_secret_of_a_working_tree_is_written_down(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A private file stays private, and a secret in a tracked file is not in the patch."""
    monkeypatch.setenv("MY_API_TOKEN", "tok-4f9a2c71e8")
    tracked = {".env": "X=tracked-secret", "pkg/login.py": "", "pkg/site.yaml": "user: me\n"}
    for name, text in tracked.items():
        (project / name).write_text(text)
    commit(project)
    untracked = {
        "pkg/.env": "PASSWORD=untracked-secret",
        "pkg/id_ed25519": "secret",
        "pkg/server.key": "-----BEGIN PRIVATE KEY-----\nsecret",
        "pkg/private.py": "WIDTH = 3\n",
    }
    for name, text in untracked.items():
        (project / name).write_text(text)
        (project / name).chmod(0o600)
    (project / ".env.example").write_text("X=...")
    (project / ".env").write_text("X=changed-secret")
    (project / "pkg/login.py").write_text('NAME = "tok-4f9a2c71e8"\nmax_tokens = 1000000\n')
    (project / "pkg/site.yaml").write_text("user: me\nurl: https://me:p@ss@host/x\n")
    subprocess.run(
        ["git", "remote", "add", "origin", "https://u:p@s/s@host/x.git?private_token=abc"],
        check=True,
    )
    content = provenance.collect()
    whole = content["project.diff"] + content["git.json"]
    assert '"remote": "https://host/x.git"' in content["git.json"]
    for secret in ("tok-4f9a", "p@s", "private_token", "changed-secret"):
        assert secret not in whole
    assert '+NAME = "***"\n+max_tokens = 1000000\n' in content["project.diff"]
    (tmp_path / "p.diff").write_text(content["project.diff"])
    shell = f"git stash -q && git apply --check {tmp_path}/p.diff && git stash pop -q"
    subprocess.run(shell, shell=True, check=True)

    before = os.umask(0o027)
    try:
        taken = taken_from(tmp_path)
        taken.write()
    finally:
        os.umask(before)
    copy = taken.path / "project"
    names = {str(path.relative_to(copy)) for path in copy.rglob("*") if path.is_file()}
    assert {"pkg/login.py", ".env.example", "pkg/private.py"} <= names
    assert not names & {".env", "pkg/.env", "pkg/id_ed25519", "pkg/server.key"}
    told = "\n".join(taken.left_out)
    for name in (".env", "pkg/.env", "pkg/id_ed25519", "pkg/server.key"):
        assert f"{project / name}: it may hold secrets" in told
    assert (copy / "pkg/private.py").stat().st_mode & 0o777 == 0o400
    assert (copy / "pkg/login.py").stat().st_mode & 0o777 == 0o440


def test_code_imported_from_elsewhere_is_another_copy(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For two folders without git and one output_dir there are two copies of the code."""
    copies = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        taken = taken_from(tmp_path)
        taken.write()
        copies.append(Snapshot.load(taken.path))
        assert copies[-1] is not None
        assert copies[-1].pythonpath == taken.pythonpath
        assert tmp_path / name in taken.pythonpath
    assert copies[0] != copies[1]


def test_an_installed_package_inside_the_repository_is_copied(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """git ignores a `.venv` in the project and so does not list the packages in it."""
    place = project / "ignored" / "site-packages" / "hpctrain"
    place.mkdir(parents=True)
    (place / "__init__.py").write_text("")
    monkeypatch.setattr(snapshot, "PACKAGE", place)
    monkeypatch.setattr(provenance, "_editable", lambda: iter(()))
    monkeypatch.setattr(sys, "path", [str(place.parent)])
    taken = taken_from(tmp_path)
    assert taken.pythonpath == (taken.path / "project", taken.path / "installed")
    assert "installed/hpctrain/__init__.py" in taken._files


def test_a_copy_of_an_installation_has_the_files_that_its_code_reads(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(provenance, "_editable", lambda: iter(()))
    monkeypatch.setattr(sys, "path", [str(project)])
    taken = taken_from(tmp_path)
    taken.write()
    code = (
        "import hpctrain; from hpctrain.base import gone, offered; "
        "from hpctrain.cluster.slurm import steps; from hpctrain.config.rules import combinations; "
        "assert gone.table() and offered.environment.SHELL.is_file() and combinations._rows(); "
        "print(hpctrain.__file__)"
    )
    env = {**os.environ, "PYTHONPATH": str(taken.path / "installed")}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    assert done.stderr == ""
    assert Path(done.stdout.strip()).is_relative_to(taken.path)


def test_submodules_and_links_are_copied_as_they_are(project: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "__init__.py").write_text("")
    commit(other)
    allow = ["git", "-c", "protocol.file.allow=always"]
    subprocess.run([*allow, "submodule", "add", "-q", str(other), "sub"], check=True, cwd=project)
    subprocess.run(["git", "clone", "-q", str(other), "clone"], check=True, cwd=project)
    # Tracked packages that have been replaced, one by a link and one by a file.
    for name in ("linked", "filed"):
        (project / name).mkdir()
        (project / name / "x.py").write_text("")
    subprocess.run(["git", "add", "linked", "filed"], check=True, cwd=project)
    shutil.rmtree(project / "filed")
    (project / "filed").write_text("")
    (project / "linked").rename(project / "moved")
    (project / "linked").symlink_to("moved")
    (project / "outside").symlink_to("../other")
    (project / "a b\nü.py").write_text("")
    taken = taken_from(tmp_path)
    assert taken.write()
    copy = taken.path / "project"
    assert (copy / "sub/__init__.py").is_file()
    (told,) = taken.left_out
    assert told.startswith(f"{project}/clone: a repository inside another: ")
    assert os.readlink(copy / "linked") == "moved"
    assert (copy / "linked" / "x.py").is_file()
    assert (copy / "filed").is_file()
    assert (copy / "outside").resolve() == other
    assert (copy / "a b\nü.py").is_file()
