"""Who holds a run, and who may lock it."""

import errno
import fcntl
import os
import signal
import socket
import subprocess
import threading
import time
from pathlib import Path

import pytest

from hpctrain.base.files import lock
from hpctrain.base.files.lock import file_lock
from hpctrain.base.names.run_record import AttemptKey
from hpctrain.cluster.ranks import epochs, leaving
from hpctrain.errors import StorageError, TrackingError
from hpctrain.runs.run_dir import RunDir
from hpctrain.tracking.store import check_store
from tests.made_runs import make_run


def test_looking_at_the_lock_takes_nothing(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    assert not RunDir(run).is_locked()
    assert not (run / "lock").exists()
    with RunDir(run).lock():
        assert RunDir(run).is_locked()
        said = (run / "lock").read_text()
        assert str(os.getpid()) in said
    assert not RunDir(run).is_locked()
    assert (run / "lock").read_text() == said


def test_a_second_process_that_a_lock_did_not_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hosts may have locks of their own. The end of the process is an exception here."""

    def end(code: int) -> None:
        raise SystemExit(code)

    monkeypatch.setattr(leaving, "_exit", end)
    run = RunDir(make_run(tmp_path))
    with run.lock():
        epochs.end_if_over(run.path, AttemptKey())
        (run.path / "lock").write_text("process 7 on elsewhere\n")
        with pytest.raises(SystemExit):
            epochs.end_if_over(run.path, AttemptKey())
    epochs.end_if_over(run.path, AttemptKey())


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK])
def test_a_run_on_a_file_system_without_locks_is_trained_and_changed(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def flock(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    run = RunDir(make_run(tmp_path))
    monkeypatch.setattr(fcntl, "flock", flock)
    monkeypatch.setattr(lock, "_without", set())
    with run.lock():
        run.update(state="running")
        assert (run.read().state, run.is_locked()) == ("running", False)
    assert caplog.text.count("this file system has no locks") == 1
    with pytest.raises(TrackingError, match=r"SQLite needs locks.* or name a path on a local disk"):
        check_store(f"sqlite:///{tmp_path}/mlflow.db", "exp")


def test_who_may_only_read_a_run_cannot_lock_it(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    before = os.umask(0o027)  # HPCTRAIN_UMASK=027: the group may read
    try:
        with RunDir(run).lock():
            RunDir(run).update(state="running")
            with file_lock(run / "other.lock", lambda: None):
                modes = {path.name: path.stat().st_mode & 0o777 for path in run.glob("*lock")}
    finally:
        os.umask(before)
    assert modes == {"lock": 0o600, ".run.json.lock": 0o600, "other.lock": 0o600}
    # A lock that an older release has made is mended; who may write may also lock.
    for mode, mended in ((0o644, 0o600), (0o660, 0o660), (0o666, 0o666), (0o664, 0o660)):
        (run / "lock").chmod(mode)
        with RunDir(run).lock():
            assert (run / "lock").stat().st_mode & 0o777 == mended


def test_who_holds_a_run_is_not_guessed(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    with subprocess.Popen(["true"]) as process:
        gone = process.pid
    here = socket.gethostname()
    for text, said in (
        ("", "in use by another process"),
        (f"process {os.getpid()} on {here}\n", f"in use by process {os.getpid()} on {here}:"),
        (f"process {gone} on elsewhere\n", f"in use by process {gone} on elsewhere:"),
    ):
        with (run / "lock").open("a+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.truncate(0)
            file.write(text)
            file.flush()
            with pytest.raises(StorageError, match=said):
                RunDir(run).check_unlocked()


def test_a_fork_during_the_wait_for_a_lock_does_not_hold_it(tmp_path: Path) -> None:
    """Threads that copy shards wait for locks, while a user's code may fork."""
    path, asked, ended = tmp_path / "lock", threading.Event(), threading.Event()

    def wait() -> None:
        asked.set()
        time.sleep(0.01)

    def hold() -> None:
        with file_lock(path, wait):
            pass
        ended.set()

    with file_lock(path, lambda: None):
        thread = threading.Thread(target=hold)
        thread.start()
        assert asked.wait(60)
        child = os.fork()
        if child == 0:
            signal.pause()
    try:
        assert ended.wait(60)
        with file_lock(path, lambda: pytest.fail("the fork holds the lock")):
            pass
    finally:
        thread.join()
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
