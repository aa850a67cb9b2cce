"""What somebody else's run directory can make `sync` do: it gets no variable and no password."""

import http.server
import json
import os
import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from hpctrain.commands.sync import sync
from hpctrain.errors import TrackingError
from hpctrain.tracking.meta import Meta
from hpctrain.tracking.server import check_experiment, check_place
from hpctrain.tracking.store import check_store, check_uri
from hpctrain.tracking.uploading.upload import Upload
from tests import forkserver
from tests.conftest import ROOT
from tests.tracking.new_tracker import SYNC, new_tracker

SECRET = "s3cret-of-the-victim"
OTHER = 65534  # user id


@pytest.fixture(autouse=True)
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "victim")
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", SECRET)


@contextmanager
def listener(location: str = "") -> Iterator[tuple[str, list[str]]]:
    """Yield the address of a server and the requests that it gets; it may redirect them."""
    requests: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            requests.append(f"{self.path}\n{self.headers}")
            self.send_response(302 if location else 404)
            self.send_header("Location", location + self.path)
            self.send_header("Content-Length", "0")
            self.end_headers()

        do_POST = do_PUT = do_GET

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", requests
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture
def planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """A function that makes a run directory of somebody else, with this URI in `meta.json`."""

    def plant(uri: str) -> Path:
        run = tmp_path / "planted"
        tracker = new_tracker(run, "http://h")
        tracker.finish("FINISHED", "")
        file = run / "journal" / "meta.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"uri": uri}))
        if os.geteuid() == 0:
            os.chown(file, OTHER, OTHER)
        else:  # only root can give a file away: be somebody else instead
            monkeypatch.setattr(os, "geteuid", lambda: OTHER)
        return run

    return plant


def pause(seconds: float) -> None:
    raise AssertionError("it has asked a store")


def test_sync_sends_nothing_to_a_store_that_only_others_name(
    planted: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    with listener() as (uri, requests):
        run = planted(f"{uri}/${{oc.env:MLFLOW_TRACKING_PASSWORD}}")
        with pytest.raises(TrackingError, match="not everything is uploaded"):
            sync([run])
        # The file may change after `sync` has looked.
        with pytest.raises(TrackingError, match="this run belongs to"):
            Upload(run, pause).drain()
    assert requests == []
    said = capsys.readouterr().err
    assert f"this run belongs to {'nobody' if os.geteuid() == 0 else ''}" in said
    assert f"status --upload --uri '{uri}/" in said
    assert SECRET not in said


def test_a_database_that_only_others_name_is_not_written(
    planted: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = planted(f"sqlite:///{tmp_path}/${{oc.env:MLFLOW_TRACKING_PASSWORD}}.db")
    with pytest.raises(TrackingError):
        sync([run])
    assert "names the store sqlite:///" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["planted"]


def test_a_store_that_the_user_names_is_used(
    planted: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = planted("http://evil:5000")
    assert Upload(run, pause, "http://mine:5000")._meta.uri == "http://mine:5000"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://evil:5000/")
    assert Upload(run, pause)._meta.uri == "http://evil:5000"


@pytest.mark.parametrize(
    ("uri", "expected"),
    [
        (
            "http://h/${oc.env:MLFLOW_TRACKING_PASSWORD}",
            "http://h/${oc.env:MLFLOW_TRACKING_PASSWORD}",
        ),
        ("http://${oc.env:MLFLOW_TRACKING_PASSWORD}:5000", None),
        ("http://me:${oc.env:MLFLOW_TRACKING_PASSWORD}@h", f"http://me:{SECRET}@h"),
        ("sqlite:////x/${oc.env:MLFLOW_TRACKING_PASSWORD}.db", f"sqlite:////x/{SECRET}.db"),
    ],
)
def test_in_ones_own_file_only_the_password_is_filled_in(
    tmp_path: Path, uri: str, expected: str | None
) -> None:
    Meta("http://h", "exp", "run", "uid").write(tmp_path)
    file = tmp_path / "journal" / "meta.json"
    named = {"run_name": "${oc.env:MLFLOW_TRACKING_PASSWORD}", "uri": uri}
    file.write_text(json.dumps(json.loads(file.read_text()) | named))
    meta = Meta.read(tmp_path)
    assert meta.uri == (expected or uri)
    assert meta.run_name == "${oc.env:MLFLOW_TRACKING_PASSWORD}"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"parent_uid": "/../../x"}))
    with pytest.raises(
        TrackingError, match=r'parent_uid is "/\.\./\.\./x"; it must be the name of'
    ):
        Meta.read(tmp_path)


def test_a_redirect_to_another_host_takes_no_password_along() -> None:
    with (
        listener() as (other, theirs),
        listener(other) as (configured, ours),
        pytest.raises(TrackingError, match="HTTP 404"),
    ):
        check_experiment(configured, "exp")
    assert [("Authorization: Basic" in request) for request in ours] == [True]
    assert [("Authorization" in request) for request in theirs] == [False]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_database_of_another_user_gets_nothing(
    database: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It could name any folder of the user, or any server, as the place of files."""
    new_tracker(run := tmp_path / "run", database).finish("FINISHED", "")
    os.chown(database, OTHER, OTHER)
    (tmp_path / "link.db").symlink_to(database)
    for path in (database, tmp_path / "link.db"):
        with pytest.raises(TrackingError, match="belongs to nobody, and a SQLite store is"):
            check_store(f"sqlite:///{path}", "exp")
    before = database.read_bytes()
    with pytest.raises(TrackingError, match="not everything is uploaded"):
        sync([run])
    assert database.read_bytes() == before
    assert "a SQLite store is for one user" in capsys.readouterr().err


def test_a_server_names_no_other_server() -> None:
    for own in ("mlflow-artifacts:/1", "http://h:5000/x", "/data/1", "s3://x/y"):
        check_place("http://h:5000", own)
    for other in ("http://h:6000/x", "https://evil/x", "mlflow-artifacts://evil/x"):
        with pytest.raises(TrackingError, match="another server, so nothing is sent there"):
            check_place("http://h:5000", other)


@pytest.mark.parametrize("uri", ["https://me:p/a@s@host:1", "https://host/?token=abc"])
def test_a_uri_with_a_secret_is_refused(uri: str) -> None:
    with pytest.raises(TrackingError, match="must not hold a password or token") as caught:
        check_uri(uri)
    assert "p/a" not in str(caught.value)
    assert "abc" not in str(caught.value)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_sync_runs_no_code_of_others_and_uploads_no_file_behind_a_link(
    database: Path, tmp_path: Path
) -> None:
    secret = tmp_path / "home" / "id_rsa.txt"
    secret.parent.mkdir()
    secret.write_text("the key of the user")
    run, uri = tmp_path / "run", f"sqlite:///{database}"
    tracker = new_tracker(run, uri)
    tracker.start({}, {})
    tracker._journal.append("model")  # of a version that built models here
    tracker.finish("FAILED", "")
    evil = tmp_path / "theirs.py"
    evil.write_text(f"open({str(tmp_path / 'was_run')!r}, 'w')\n")
    (run / "config.yaml").write_text("model:\n  _target_: theirs.Model\n")
    (run / "run.json").write_text(json.dumps({"state": "finished", "code": "0" * 16}))
    (tmp_path / "code" / ("0" * 16)).mkdir(parents=True)
    (tmp_path / "code" / ("0" * 16) / "pythonpath.json").write_text(json.dumps([str(tmp_path)]))
    for folder in ("provenance", "logs", "monitor"):
        (run / folder).mkdir()
    (run / "provenance" / "notes.txt").symlink_to(secret)
    (run / "provenance" / "git.json").write_text("[]")
    (run / "logs" / "zzz.rank0.log").symlink_to(secret)
    (run / "monitor" / "n1.idle").symlink_to(secret)
    for path in (run / "config.yaml", run / "run.json"):
        os.chown(path, OTHER, OTHER)
    done = forkserver.run([*SYNC, str(run)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "was_run").exists()
    with sqlite3.connect(database) as store:
        ((place,),) = store.execute("SELECT artifact_uri FROM runs").fetchall()
        assert secret.read_text() not in "\n".join(store.iterdump())
    store.close()
    folder = Path(place.removeprefix("file://"))
    found = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert found == {"config.yaml", "provenance/git.json"}
    # The lock of an upload that is a link to a file of the user: its mode stays.
    for name in ("upload.lock", "uploaded.json"):
        (run / "journal" / name).unlink()
    (run / "journal" / "upload.lock").symlink_to(secret)
    with pytest.raises(TrackingError, match="not everything is uploaded"):
        sync([run])
    assert secret.stat().st_mode & 0o777 == 0o644
