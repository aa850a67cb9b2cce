"""Unfinished files in a folder where others may write."""

import os
import socket
from pathlib import Path

import pytest

from hpctrain import disk


def test_a_link_that_somebody_put_there_is_not_written_through(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    folder = tmp_path / "shared"
    folder.mkdir()
    # The name that releases up to 0.3 used could be predicted.
    guess = folder / f".run.json.{socket.gethostname()}.{os.getpid()}"
    guess.symlink_to(victim)
    disk.write_atomically(folder / "run.json", "{}")
    assert (folder / "run.json").read_text() == "{}"
    # Even a name that was guessed is refused.
    monkeypatch.setattr(disk, "temporary", lambda path: guess)
    with pytest.raises(FileExistsError):
        disk.write_atomically(folder / "run.json", "other")
    assert victim.read_text() == "precious"


def test_no_two_temporary_names_are_equal(tmp_path: Path) -> None:
    names = {disk.temporary(tmp_path / "a.json").name for _ in range(10)}
    assert len(names) == 10
    for name in names:
        found = disk.TEMPORARY.match(name)
        assert found is not None
        assert found["pid"] == str(os.getpid())
    assert disk.TEMPORARY.match(".a.json.node1.123")  # of an earlier release


def test_a_write_that_fails_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "folder" / "in").mkdir(parents=True)
    with pytest.raises(OSError, match="folder"):
        disk.write_atomically(tmp_path / "folder", "x")
    assert os.listdir(tmp_path) == ["folder"]
