"""Messages of a webhook, sent to a real HTTP server on this machine."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from hpctrain.errors import ConfigError
from hpctrain.trackers import Webhook
from hpctrain.trackers.several import SeveralTrackers
from hpctrain.trackers.webhook import kind_of, send
from hpctrain.tracking.meta import Meta
from hpctrain.tracking.tracker import JournalTracker

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


def attempt(run: Path, **options: Any) -> SeveralTrackers:
    """Return the trackers of an attempt of a run, with a webhook beside the journal."""
    meta = Meta("http://127.0.0.1:9", "exp", "digits lr=1", "u")
    journal = JournalTracker(run, meta, upload=False)
    tracker = SeveralTrackers(journal, [Webhook(**options)], run, "digits lr=1", "u")
    tracker.start({}, {})
    return tracker


def told(server: Server) -> list[str]:
    return [message["event"] for _, message in server.got]


def test_each_event_is_told_once(server: Server, tmp_path: Path) -> None:
    first = attempt(tmp_path)
    first.log_metrics({"train/loss": 1.0}, 7)
    first.log_metrics({"train/loss": float("nan")}, 8)
    first.log_metrics({"train/loss": float("inf")}, 9)
    assert told(server) == ["nan"]
    facts = server.got[0][1]
    assert facts["title"] == "digits lr=1 has a number that is not finite"
    assert (facts["reason"], facts["step"]) == ("train/loss is nan", 8)
    assert str(tmp_path) in facts["text"]
    for topic, text in (("flat", "it is flat"), ("flat", ""), ("flat", "again"), ("spike", "up")):
        first.log_note(topic, text, 20)
    assert [facts["reason"] for _, facts in server.got[1:]] == ["it is flat", "up"]
    assert server.got.pop()[1]["title"] == "digits lr=1 looks wrong"
    first.finish("FAILED", "OSError: no luck")
    assert told(server)[2:] == ["failed"]
    # Another attempt has its own events. The batch script decides on an end that is not final.
    attempt(tmp_path).finish("FAILED", "Connection closed by peer", final=False)
    attempt(tmp_path).finish("KILLED", "stopped by SIGUSR2 at step 8, saved")
    attempt(tmp_path, on=["failed"]).finish("FINISHED")
    assert told(server)[3:] == []
    attempt(tmp_path).finish("FINISHED")
    assert told(server)[3:] == ["finished"]
    for file in tmp_path.rglob("*"):
        assert not file.is_file() or "a-secret-part" not in file.read_text()


def test_a_webhook_that_refuses_costs_a_line(
    server: Server, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for server.status, reason in ((404, "HTTP 404 no such hook ***"), (0, "RemoteDisconnected")):
        attempt(tmp_path).finish("FAILED", "OSError: no luck")
        (line,) = [record.getMessage() for record in caplog.records]
        assert f"did not take the message that the run failed: {reason}" in line
        assert "a-secret-part" not in line
        caplog.clear()


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


def test_a_webhook_that_hangs_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    import socket

    monkeypatch.setattr("hpctrain.trackers.webhook._TIMEOUT", 0.05)
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


def test_what_is_wrong_is_said_when_the_run_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HPCTRAIN_WEBHOOK", "ftp://127.0.0.1/a")
    for options, message in (
        ({}, "variable=HPCTRAIN_WEBHOOK: export it"),
        ({"variable": "MY_WEBHOOK"}, "variable=MY_WEBHOOK: export it"),
        ({"on": ["fnished"]}, "on=fnished: allowed are failed, finished, nan, note"),
    ):
        with pytest.raises(ConfigError, match=message):
            Webhook(**options)
