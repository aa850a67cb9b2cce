"""What torch.compile runs is from the run directory, never from a folder of somebody else."""

import os
import tempfile
from pathlib import Path

import pytest

from hpctrain.engine.job import compile_cache
from hpctrain.engine.job.compile_cache import HEADERS, TORCH, TRITON
from hpctrain.errors import StorageError

SOMEBODY = 4321  # a user id


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that torch takes by default, which does not exist yet."""
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    temporary.chmod(0o1777)
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    monkeypatch.setenv("LOGNAME", "me")
    return temporary / "torchinductor_me"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


def give(path: Path) -> None:
    """Make another user the owner."""
    if os.geteuid() != 0:
        pytest.skip("only root can make files of another user")
    os.chown(path, SOMEBODY, SOMEBODY)


def test_the_cache_is_private_and_in_the_run_directory(run: Path, shared: Path) -> None:
    found: dict[str, str] = {}
    compile_cache.use(run, found)
    assert found == {TORCH: f"{run}/compile", TRITON: f"{run}/compile/triton", HEADERS: "0"}
    assert (run / "compile").stat().st_mode & 0o777 == 0o700
    before = dict(found)
    compile_cache.use(run, found)
    assert found == before


def test_what_the_user_has_set_is_kept(run: Path, shared: Path) -> None:
    mine = {TORCH: "/mine", TRITON: "/mine too", HEADERS: "1"}
    found = dict(mine)
    compile_cache.use(run, found)
    assert found == mine
    assert not (run / "compile").exists()
    # torch has set this one itself, because it is imported in this process.
    import torch._dynamo  # noqa: F401

    found = {TORCH: str(shared)}
    compile_cache.use(run, found)
    assert found[TORCH] == f"{run}/compile"


def test_a_run_directory_of_several_users(run: Path, shared: Path) -> None:
    (run / "compile").mkdir()
    give(run / "compile")
    found: dict[str, str] = {}
    compile_cache.use(run, found)
    mine = run / f"compile.{os.geteuid()}"
    assert found[TORCH] == str(mine)
    mine.chmod(0o770)
    with pytest.raises(StorageError, match=r"compile\.0: not a folder of this user, or others can"):
        compile_cache.use(run, {})
