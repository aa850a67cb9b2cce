"""Alerts, sent to a real HTTP server on this machine."""

import json
import os
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from hpctrain.base.files.record import written
from hpctrain.base.names.run_record import Hang
from hpctrain.config.schema import Config
from hpctrain.config.validate import validate
from hpctrain.errors import ConfigError
from hpctrain.tracking import final_status, samples
from hpctrain.tracking.alerts import Alerts, kind_of, send
from hpctrain.tracking.meta import AlertSettings, variable_of
from hpctrain.tracking.tracker import JournalTracker
from hpctrain.tracking.uploading.nodes import Nodes
from tests.tracking.new_tracker import new_tracker

Message = tuple[dict[str, str], Any]

# A submission warns of addresses of webhooks in the code that it copies, also of made-up ones.
SLACK, DISCORD, OFFICE = "slack.com", "discord.com/api", "office.com"
AZURE = "azure.com"


class Server(ThreadingHTTPServer):
    """A webhook. `status` is its answer; with 0 it closes the connection without one."""

    status = 200
    got: list[Message]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/hook/a-secret-part"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        is_json = self.headers["Content-Type"] == "application/json"
        self.server.got.append((dict(self.headers), json.loads(body) if is_json else body))
        if self.server.status:
            self.send_response(self.server.status)
            self.end_headers()
            if self.server.status >= 400:
                self.wfile.write(f"no such hook {self.server.url}".encode())

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    with Server(("127.0.0.1", 0), Handler) as server:
        server.got = []
        threading.Thread(target=server.serve_forever, args=[0.01], daemon=True).start()
        monkeypatch.setenv("HPCTRAIN_WEBHOOK", server.url)
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        yield server
        server.shutdown()


EVENTS = ("failed", "stalled", "nan", "note", "idle", "finished")


def attempt(run: Path, on: tuple[str, ...] = EVENTS) -> JournalTracker:
    tracker = new_tracker(run, "http://127.0.0.1:9", run_name="digits lr=1")
    AlertSettings("HPCTRAIN_WEBHOOK", on).put(run)
    tracker.start({}, {})
    return tracker


def told(server: Server) -> list[str]:
    return [message["event"] for _, message in server.got]


def test_each_event_is_told_once_by_whatever_process(server: Server, tmp_path: Path) -> None:
    first = attempt(tmp_path)
    first.log_metrics({"train/loss": 1.0}, 7)
    first.log_metrics({"train/loss": float("nan")}, 8)
    first.log_metrics({"train/loss": float("inf")}, 9)
    for _ in range(2):
        Alerts(tmp_path).look()
    assert told(server) == ["nan"]
    facts = server.got[0][1]
    assert facts["title"] == "digits lr=1 has a number that is not finite"
    assert (facts["reason"], facts["step"]) == ("train/loss is nan", 8)
    assert str(tmp_path) in facts["text"]

    # An hour later.
    later = Alerts(tmp_path, lambda: os.stat(tmp_path).st_mtime + 3600)
    (samples.folder(tmp_path)).mkdir()
    (samples.folder(tmp_path) / "n01.idle").write_text("n01: gpu_0 below 5%\n")
    later.look()
    later.look()
    assert told(server) == ["nan", "stalled", "idle"]
    hang = Hang(sentence="rank 1 hangs", rank=1, host="n1", state="asleep", time=time.time())
    (tmp_path / "hang.json").write_text(written(hang))
    later.look()
    later.look()
    assert told(server) == ["nan", "stalled", "idle", "stalled"]
    assert server.got.pop()[1]["reason"] == "rank 1 hangs"
    assert Nodes(tmp_path).new_tags()["hpctrain.hang"] == "rank 1 hangs"
    (tmp_path / "hang.json").unlink()
    first.finish("FAILED", "OSError: no luck")
    for _ in range(2):
        Alerts(tmp_path).look()
    assert told(server) == ["nan", "stalled", "idle", "failed"]
    # Another attempt has its own events.
    attempt(tmp_path).finish("FINISHED")
    Alerts(tmp_path).look()
    assert told(server)[4:] == ["finished"]
    # A run that ended days ago wakes nobody.
    (tmp_path / "journal" / "notified.json").unlink()
    Alerts(tmp_path, lambda: os.stat(tmp_path).st_mtime + 5 * 86400).look()
    assert len(server.got) == 5
    assert "a-secret-part" not in (tmp_path / "journal" / "notify.json").read_text()


def test_each_topic_of_a_note_is_told_once(server: Server, tmp_path: Path) -> None:
    tracker = attempt(tmp_path)
    for topic, text in (("flat", "it is flat"), ("flat", ""), ("flat", "again"), ("spike", "up")):
        tracker.log_note(topic, text, 20)
    for _ in range(2):
        Alerts(tmp_path).look()
    assert [facts["reason"] for _, facts in server.got] == ["it is flat", "up"]
    assert {facts["title"] for _, facts in server.got} == {"digits lr=1 looks wrong"}


def test_only_the_end_that_counts_is_told(server: Server, tmp_path: Path) -> None:
    # Rank 0 sees a broken connection; the batch script decides, and requeues or says the cause.
    attempt(tmp_path).finish("FAILED", "Connection closed by peer", final=False)
    Alerts(tmp_path).look()
    assert told(server) == []
    cause = "a rank was killed (exit code 137), not requeued"
    assert final_status.correct(tmp_path, "FAILED", cause)
    Alerts(tmp_path).look()
    assert (told(server), server.got[0][1]["reason"]) == (["failed"], cause)
    # A run that was stopped and saved goes on later; one that Slurm has killed does not.
    attempt(tmp_path).finish("KILLED", "stopped by SIGUSR2 at step 8, saved")
    Alerts(tmp_path).look()
    assert told(server) == ["failed"]
    attempt(tmp_path, on=("failed",))
    final_status.close(tmp_path, "KILLED", "TIMEOUT")
    Alerts(tmp_path).look()
    assert told(server) == ["failed", "failed"]
    # A trial of a search that waits at a rung, and is not promoted, has ended as planned.
    attempt(tmp_path, on=("failed",)).finish("SCHEDULED", "paused at step 8")
    assert final_status.prune(tmp_path, "pruned at step 8: 5 trials were better")
    assert not final_status.prune(tmp_path, "pruned at step 8: 6 trials were better")
    Alerts(tmp_path).look()
    assert told(server) == ["failed", "failed"]


def test_a_webhook_that_refuses_costs_a_line_and_is_asked_again_later(
    server: Server, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    attempt(tmp_path).finish("FAILED", "OSError: no luck")
    for server.status, reason in ((404, "HTTP 404 no such hook ***"), (0, "RemoteDisconnected")):
        alerts = Alerts(tmp_path)
        alerts.look()
        alerts.look()
        (line,) = [record.getMessage() for record in caplog.records]
        assert f"did not take the message that the run failed: {reason}" in line
        assert "a-secret-part" not in line
        caplog.clear()
    assert len(server.got) == 2
    server.status = 204
    Alerts(tmp_path).look()
    Alerts(tmp_path).look()
    assert len(server.got) == 3


def test_each_service_gets_its_form(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    forms = []
    for kind in ("slack", "discord", "ntfy", "teams"):
        assert send(server.url, kind, "r has failed", "a\nb", {}) == ""
        assert send(server.url, kind, "r\n\u202e", "<!channel> & \x1b[8m", {}) == ""
        forms.append(server.got[-2])
    assert forms[0][1] == {"text": "*r has failed*\na\nb"}
    assert forms[1][1]["content"] == "**r has failed**\na\nb"
    assert (forms[2][0]["Title"], forms[2][1]) == ("r has failed", "a\nb")
    assert forms[3][1]["attachments"][0]["content"]["body"][1]["text"] == "a\n\nb"
    slack = next(body for _, body in server.got if "&lt;!channel&gt;" in str(body))
    assert slack == {"text": "*r\\n\\u202e*\n&lt;!channel&gt; &amp; \\x1b[8m"}
    # A redirect would take the message elsewhere.
    server.status = 302
    assert send(server.url, "json", "t", "", {}).startswith("HTTP 302")
    assert send("ftp://127.0.0.1/a", "json", "t", "", {}).startswith("the address begins neither")


def test_a_webhook_that_hangs_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    import socket

    monkeypatch.setattr("hpctrain.tracking.alerts._TIMEOUT", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        assert "timed out" in send(f"http://127.0.0.1:{port}/x", "json", "t", "", {})


@pytest.mark.parametrize(
    ("url", "kind"),
    [
        (f"https://hooks.{SLACK}/services/T/B/x", "slack"),
        (f"https://{DISCORD}/webhooks/1/x", "discord"),
        ("https://ntfy.sh/topic", "ntfy"),
        ("https://ntfy.example.org/topic", "ntfy"),
        (f"https://acme.webhook.{OFFICE}/webhookb2/x", "teams"),
        (f"https://prod-1.westeurope.logic.{AZURE}:443/workflows/x", "teams"),
        ("https://not-slack.com/hooks.slack.com", "json"),
    ],
)
def test_the_kind_follows_from_the_host(url: str, kind: str) -> None:
    assert kind_of(url) == kind


def test_an_address_that_would_be_written_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"https://hooks.{SLACK}/services/T0/B0/abcdefgh"
    config = Config()
    config.notify.url = url
    with pytest.raises(ConfigError, match=r"HPCTRAIN_WEBHOOK") as caught:
        validate(config)
    assert url not in str(caught.value)
    monkeypatch.setenv("MY_WEBHOOK", url)
    assert variable_of(url) == "MY_WEBHOOK"
    config.tracking.enabled = False
    config.notify.on = ["failed", "fnished"]
    with pytest.raises(ConfigError, match=r"notify\.on=.*'fnished'.*allowed are failed") as caught:
        validate(config)
    assert "notify.url needs tracking.enabled=true" in str(caught.value)
