"""Tests of the tracking URI, and of stores that are new, damaged or do not answer."""

import os
import socket
import sqlite3
import tempfile
import time
from contextlib import closing
from pathlib import Path

import pytest

from hpctrain.commands.sync import sync
from hpctrain.config.schema.watching import TrackingConfig
from hpctrain.errors import TrackingError
from hpctrain.insight.doctor.login import mlflow_store
from hpctrain.tracking.store import beside, check_store, check_uri, resolve_uri
from tests.tracking.new_tracker import new_tracker
from tests.tracking.token_proxy import TOKEN, TokenProxy


def test_a_link_to_a_network_file_system_is_seen_through(tmp_path: Path) -> None:
    (tmp_path / "far").mkdir()
    (tmp_path / "near").symlink_to("far")
    mounts = tmp_path / "mounts"
    mounts.write_text(f"8 1 0:8 / / rw - ext4 a rw\n9 8 0:9 / {tmp_path}/far rw - gpfs b rw\n")
    with pytest.raises(TrackingError, match=r"\(gpfs\).*mlflow server.*--upload"):
        check_uri(f"sqlite:///{tmp_path}/near/mlflow.db", mounts)
    check_uri(f"sqlite:///{tmp_path}/mlflow.db", mounts)


@pytest.mark.parametrize(
    "uri",
    ["mlruns", "./mlruns", "file:///x", "/x/y", "sqlite://", "sqlite:///", "postgresql://h/d",
     "sqlite:///:memory:", "databricks", "sqlite:///a.db?x=1", ""],
)  # fmt: skip
def test_other_stores_are_refused(uri: str) -> None:
    with pytest.raises(TrackingError, match=r"sqlite:///mlflow\.db"):
        check_uri(uri)


def test_the_file_store_has_a_road_out() -> None:
    with pytest.raises(TrackingError, match=r"file store into a database: .*migrate-filestore"):
        check_uri("file:///tmp/mlruns")


@pytest.mark.parametrize("name", ["mlflow.db", "there/mlflow.db"])
def test_a_loop_of_links_is_no_store(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    loop = tmp_path / name.partition("/")[0]
    loop.symlink_to(loop)
    uri = f"sqlite:///{tmp_path}/{name}"
    with pytest.raises(TrackingError, match="a link in this path leads to itself"):
        check_store(uri, "exp")  # a training
    tracking = TrackingConfig(uri=uri)
    assert "a link in this path leads to itself" in mlflow_store(tracking).found
    new_tracker(tmp_path / "run", uri).finish("FINISHED")
    with pytest.raises(TrackingError, match="not everything is uploaded"):
        sync([tmp_path / "run"])
    assert "a link in this path leads to itself" in capsys.readouterr().err


def test_a_password_belongs_in_the_environment() -> None:
    check_uri("https://me@host:1")
    with pytest.raises(TrackingError, match="MLFLOW_TRACKING_PASSWORD") as error:
        check_uri("https://me:secret@host:1")
    assert "secret" not in str(error.value)


def test_relative_paths_become_absolute(tmp_path: Path) -> None:
    assert resolve_uri("sqlite:///a/m.db", tmp_path) == f"sqlite:///{tmp_path}/a/m.db"
    assert resolve_uri("sqlite:////a/m.db", tmp_path) == "sqlite:////a/m.db"
    assert resolve_uri("http://h:5000", tmp_path) == "http://h:5000"


def test_many_processes_make_a_fresh_store(first_store: tuple[Path, list[int]]) -> None:
    path, codes = first_store
    assert codes == [0] * 3
    assert {each.name for each in path.parent.iterdir()} == {"mlflow.db", ".mlflow.db.lock"}
    assert check_store(f"sqlite:///{path}", "exp")
    assert check_store(f"sqlite:///{path}", "another"), "an uploader makes it"


def test_a_store_that_is_not_one(tmp_path: Path) -> None:
    (tmp_path / "not.db").write_text("this is not a database, whatever its name says" * 100)
    with pytest.raises(TrackingError, match="file is not a database"):
        check_store(f"sqlite:///{tmp_path}/not.db", "exp")


def test_the_store_of_another_user_is_named_with_the_cure() -> None:
    # Another user cannot enter pytest's own folder.
    with tempfile.TemporaryDirectory() as shared:
        lock = beside(Path(shared, "mlflow.db"), "lock")
        lock.touch()
        lock.chmod(0o600 if os.geteuid() == 0 else 0)
        Path(shared).chmod(0o755)
        if os.geteuid() == 0:  # the second user; without root, a file that its owner may not open
            os.seteuid(65534)
        try:
            with pytest.raises(TrackingError) as caught:
                check_store(f"sqlite:///{shared}/mlflow.db", "exp")
        finally:
            os.seteuid(os.getuid())
        owner = lock.owner()
    assert f"{lock} belongs to {owner}, and a SQLite store is for one user" in str(caught.value)
    assert "tracking.uri=http://HOST:5000; or give an output_dir of your own" in str(caught.value)


def test_a_server_that_is_away_is_no_error(caplog: pytest.LogCaptureFixture) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        uri = f"http://127.0.0.1:{unused.getsockname()[1]}"
        assert check_store(uri, "exp") is False
        assert "hpctrain status --upload" in caplog.text
        # The port is open, but there is never an answer.
        unused.listen()
        begin = time.perf_counter()
        assert check_store(uri, "exp") is False
        # MLflow alone would try for minutes.
        assert time.perf_counter() - begin < 60


def test_a_proxy_that_forbids_is_no_missing_password(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with TokenProxy(403) as proxy:
        assert check_store(proxy.uri, "exp") is False
        assert "HTTP 403: something before the server forbids it" in caplog.text
        for name in ("no_proxy", "NO_PROXY"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("http_proxy", proxy.uri.replace("//", "//me:secret@"))
        assert check_store("http://tracking.example:5000", "exp") is False
        cure = f"so says the proxy {proxy.uri}: `export no_proxy=tracking.example` goes past it"
        assert cure in caplog.text
        assert "PASSWORD" not in caplog.text


def test_a_wrong_token_and_a_deleted_experiment_are_told(
    database: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with TokenProxy() as proxy:
        for given, refused in (
            (None, "the lack of a password"),
            ("wrong-token", "the token (MLFLOW_TRACKING_TOKEN)"),
        ):
            if given:
                monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", given)
            assert check_store(proxy.uri, "exp") is False
            assert f"HTTP 401: it refuses {refused}; export MLFLOW_" in caplog.text
        # With the right one it comes to the server behind, which is down.
        monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", TOKEN)
        assert check_store(proxy.uri, "exp") is False
        assert "HTTP 502" in caplog.text
    uri = f"sqlite:///{database}"
    assert check_store(uri, "exp")
    with closing(sqlite3.connect(database)) as connection, connection:
        connection.execute("UPDATE experiments SET lifecycle_stage = 'deleted' WHERE name = 'exp'")
    assert check_store(uri, "exp") is False
    cure = f"MLFLOW_TRACKING_URI={uri} mlflow experiments restore --experiment-id 2"
    assert cure in caplog.text
