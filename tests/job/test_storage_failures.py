"""A training whose storage fails, or that raises what is no Exception, ends with a clear word."""

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from torch.distributed.checkpoint.api import CheckpointException

from hpctrain.cluster.ranks.ranks import RankInfo
from hpctrain.errors import StorageError
from hpctrain.runs.run_dir import told
from hpctrain.runs.terminal_log import kept
from tests.conftest import NET, Completed, runs

Train = Callable[..., Completed]
SIZE = ("train.max_steps=60", "checkpoint.every_steps=4", "checkpoint.keep=100", "tracking=off")
ACTING = NET.replace(
    "        return super()",
    "        self.calls = getattr(self, 'calls', 0) + 1\n"
    "        if self.calls == 6:\n"
    "            ACTION\n"
    "        return super()",
)


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    """A function that mounts a file system of so many KiB."""
    if os.geteuid():
        pytest.skip("only root mounts a small file system")
    folder = tmp_path / "small"
    folder.mkdir()

    def mount(size: int) -> Path:
        command = ["mount", "-t", "tmpfs", "-o", f"size={size}k,mode=700", "tmpfs", str(folder)]
        if subprocess.run(command, capture_output=True, check=False).returncode:
            pytest.skip("no file system can be mounted here")
        return folder

    yield mount
    subprocess.run(["umount", "--lazy", str(folder)], check=False, capture_output=True)


def ends_in_one_sentence(done: Completed) -> str:
    """Return the last line, which is the error; there is no traceback."""
    assert "Traceback" not in done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith("error: ")
    return last


@pytest.mark.parametrize(
    "size",
    [
        2400,  # at a checkpoint
        *(pytest.param(size, marks=pytest.mark.slow) for size in (4, 16, 24, 32, 48, 64, 256)),
    ],
)
def test_a_full_disk(train: Train, small: Callable[[int], Path], size: int) -> None:
    folder = small(size)
    last = ends_in_one_sentence(train(*SIZE, f"output_dir={folder}/runs", code=6))
    assert "No space left on device" in last
    if size > 2000:
        assert "the checkpoint was not written (No space left" in last
        (log,) = folder.glob("runs/*/logs/*.log")
        assert "Traceback" not in log.read_text()


def test_a_run_directory_that_is_deleted_while_it_trains(train: Train, tmp_path: Path) -> None:
    action = "import shutil, glob; shutil.rmtree(glob.glob('runs/digits-*')[0])"
    (tmp_path / "my_net.py").write_text(ACTING.replace("ACTION", action))
    done = train("model._target_=my_net.Net", *SIZE, code=6)
    last = ends_in_one_sentence(done)
    assert last.startswith(f"error: {tmp_path}/runs/digits-")
    assert "is gone: it was deleted or renamed while the run was under way" in last
    assert not runs(tmp_path / "runs"), "no checkpoint was written where nobody finds it"


def test_only_failures_of_the_storage_are_retold(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").touch()
    for error in (ValueError("a value"), OSError(2, "No such file", "/elsewhere")):
        with pytest.raises(type(error)) as raised, told(tmp_path):
            raise error
        assert raised.value is error
    inside = tmp_path / "run.json"
    denied = r"run\.json: cannot be read or written \(Denied\)"
    with pytest.raises(StorageError, match=denied), told(tmp_path):
        raise PermissionError(13, "Denied", str(inside))
    full = r"cannot be written \(Disk quota exceeded; .* bytes free"
    with pytest.raises(StorageError, match=full), told(tmp_path):
        raise OSError(122, "Disk quota exceeded")
    (tmp_path / "config.yaml").unlink()
    with pytest.raises(StorageError, match="is gone"), told(tmp_path):
        raise KeyError("attempts")


def test_the_log_has_every_error_but_the_end_that_a_user_asks_for(tmp_path: Path) -> None:
    with pytest.raises(CheckpointException), kept(tmp_path, RankInfo("single", rank=0)):
        raise CheckpointException("not written", {})
    (log,) = tmp_path.iterdir()
    assert "CheckpointException: " in log.read_text()
    log.unlink()
    for error in (SystemExit(1), KeyboardInterrupt()):
        with pytest.raises(type(error)), kept(tmp_path, RankInfo("single", rank=0)):
            raise error
    assert [path.read_text() for path in tmp_path.iterdir()] == ["", ""]
