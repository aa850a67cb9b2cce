"""Unfinished files where others may write; files of strangers are read without waiting."""

import os
import pwd
import socket
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from hpctrain.base.files import disk
from hpctrain.base.files.disk import open_regular
from hpctrain.base.processes.child import python_module
from hpctrain.errors import ConfigError
from hpctrain.tracking.journal_line import parse

if TYPE_CHECKING:
    from hpctrain.config.composing.compose_sweep import Composer

DEEP = "[" * 100_000


def test_a_user_without_an_entry_in_passwd(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, composer: "Composer"
) -> None:
    def unknown(_: object) -> None:
        raise KeyError

    monkeypatch.setattr(pwd, "getpwuid", unknown)  # a mock: this user has an entry
    for home, given in ((None, "/"), (str(tmp_path), str(tmp_path))):
        monkeypatch.delenv("HOME", raising=False)
        if home:
            monkeypatch.setenv("HOME", home)
        _, env = python_module("hpctrain.tracking.uploading.client")
        assert env["HOME"] == given
    monkeypatch.delenv("HOME")
    here = ["experiment=digits", f"data.path={tmp_path}"]
    for words in (["output_dir='~/runs'"], ["checkpoint.init_from='~/w'"], ["output_dir='~no/x'"]):
        with pytest.raises(ConfigError, match=r"=~\w*/\w+: the home folder ~\w* is not known here"):
            composer.typed([*here, *words])
    (tmp_path / "~x").mkdir()
    monkeypatch.chdir(tmp_path)
    assert composer.typed([*here, "output_dir='~x'"]).output_dir == str(tmp_path / "~x")


def test_only_regular_files_are_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path / "fifo", tmp_path, Path("/dev/zero")):
        with pytest.raises(OSError, match="not a regular file") as caught:
            open_regular(path)
        assert caught.value.filename == str(path)
    (tmp_path / "file").write_text("[1, 2]")
    (tmp_path / "link").symlink_to("file")
    with pytest.raises(OSError, match="it is a link"):
        open_regular(tmp_path / "link")
    for path, parts in ((tmp_path / "file", 1), (tmp_path / "link", 0)):
        with open_regular(path, parts) as file:
            assert file.read() == b"[1, 2]"


def test_no_part_below_a_run_is_a_link(tmp_path: Path) -> None:
    real = tmp_path / "elsewhere" / "run"
    (real / "a" / "b").mkdir(parents=True)
    (real / "a" / "b" / "file").write_text("1")
    (tmp_path / "here").symlink_to("elsewhere")  # above the run, the user's own folders
    run = tmp_path / "here" / "run"
    with open_regular(run / "a" / "b" / "file", parts=3) as file:
        assert file.read() == b"1"
    for link, to in (("a/b/link", "file"), ("a/c", "b"), ("d", "a")):
        (real / link).symlink_to(to)
    for name in ("a/b/link", "a/c/file", "d/b/file"):
        with pytest.raises(OSError, match="it is a link, or lies behind one") as caught:
            open_regular(run / name, parts=3)
        assert caught.value.filename == str(run / name)
    with pytest.raises(FileNotFoundError, match=r"a/x/file"):
        open_regular(run / "a" / "x" / "file", parts=3)


def test_a_journal_line_that_is_nested_too_deeply_is_no_record() -> None:
    assert parse(DEEP.encode()) is None


def test_a_link_that_somebody_put_there_is_not_written_through(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    folder = tmp_path / "shared"
    folder.mkdir()
    # Somebody else can predict this name.
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
    assert disk.TEMPORARY.match(".a.json.node1.123")  # without a random part


def test_a_new_name_is_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[tuple[str, list[str]]] = []
    call = os.fsync

    def fsync(descriptor: int) -> None:
        call(descriptor)
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        synced.append((path.name, os.listdir(path) if path.is_dir() else []))

    monkeypatch.setattr(os, "fsync", fsync)
    disk.write_atomically(tmp_path / "a", "1")
    assert synced[-1] == (tmp_path.name, ["a"])
    assert disk.create(tmp_path / "b", "1")
    assert (synced[-1][0], set(synced[-1][1])) == (tmp_path.name, {"a", "b"})
    known = len(synced)
    disk.write_atomically(tmp_path / "a", "2", sync=False)
    assert disk.create(tmp_path / "c", "1", sync=False)
    assert len(synced) == known


def test_a_write_that_fails_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "folder" / "in").mkdir(parents=True)
    with pytest.raises(OSError, match="folder"):
        disk.write_atomically(tmp_path / "folder", "x")
    assert os.listdir(tmp_path) == ["folder"]
