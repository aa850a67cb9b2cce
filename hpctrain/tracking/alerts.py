"""Read a journal for what people want to know, and tell it once.

    status FAILED                            failed, or nan if a number was not finite
    a metric that is not finite              nan
    a note                                   note
    no record for half an hour               stalled
    hang.json                                stalled
    monitor/NODE.idle                        idle
    status FINISHED                          finished

The journal is read apart from the upload, so that a message is sent also while MLflow is down.
`journal/notified.json` has what was told. An event is noted before it is sent, so that a process
which is killed in between sends it no second time; it is noted as open again if nobody took it.
A message has the form of its service, and is sent with the standard library.
"""

import html
import http.client
import json
import logging
import math
import os
import ssl
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hpctrain.base.files.disk import write_atomically
from hpctrain.base.files.record import Time, read_known
from hpctrain.base.names.run_record import Hang
from hpctrain.base.secrets import mask
from hpctrain.base.terminal.terminal import harmless, printable
from hpctrain.tracking import samples
from hpctrain.tracking.journal import journal_path, read_all
from hpctrain.tracking.meta import AlertSettings, Meta
from hpctrain.tracking.page.links import pages_of

log = logging.getLogger(__name__)

_STALLED_S = 30 * 60.0
_OLD_S = 24 * 3600.0  # `sync` of a run that has ended before does not wake anybody
_TIMEOUT = 5.0  # seconds
_HOSTS = {
    "slack": ("hooks.slack.com", "hooks.slack-gov.com"),
    "discord": ("discord.com", "discordapp.com"),
    "ntfy": ("ntfy.sh",),
    "teams": ("webhook.office.com", "logic.azure.com", "api.powerplatform.com"),
}


class Alerts:
    """The alerts of one run. The caller holds `upload_lock`."""

    def __init__(self, run_dir: Path, clock: Callable[[], float] = time.time) -> None:
        self._run_dir, self._clock = run_dir, clock
        self._settings = AlertSettings.get(run_dir, own=True)
        self._position = 0
        self._attempt, self._step = 0, 0
        self._began, self._last = 0.0, 0.0
        self._running = False
        self._refused: set[str] = set()  # by this process, which does not ask again

    def look(self) -> None:
        """Read what is new, and tell what has to be told. It takes some seconds at most."""
        if self._settings is None:
            return
        for record in read_all(journal_path(self._run_dir), self._position):
            self._learn(record.body)
            self._position = record.end
        if not self._running:
            return
        if self._clock() - self._last > _STALLED_S:
            minutes = f"{_STALLED_S / 60:g} minutes"
            self._tell("stalled", f"nothing was logged for {minutes}", self._clock())
        for when, text in samples.idle(self._run_dir).values():
            if when >= self._began:
                self._tell("idle", text, when)
        hang = Hang.get(self._run_dir)
        if hang is not None and hang.time >= self._began:
            self._tell("stalled", hang.sentence, hang.time, "hang")

    def killed(self, reason: str) -> None:
        """Tell that the process of the run is gone, which the journal does not say."""
        if self._settings is not None and self._running:
            self._tell("failed", reason, self._clock())

    def _learn(self, body: dict[str, Any]) -> None:
        when = float(body["time"])
        if body["attempt"] > self._attempt:
            self._attempt, self._began = int(body["attempt"]), when
        self._last = max(self._last, when)
        if body["kind"] == "metrics":
            self._step = int(body["step"])
            wrong = [
                f"{key} is {value}"
                for key, value in body["metrics"].items()
                if isinstance(value, str) and not math.isfinite(float(value))
            ]
            if wrong:
                self._tell("nan", ", ".join(wrong), when)
        elif body["kind"] == "note" and body["text"]:
            self._tell("note", str(body["text"]), when, str(body["topic"]))
        elif body["kind"] == "status":
            status, reason = body["status"], str(body.get("reason", ""))
            self._running = status == "RUNNING"
            if status == "FINISHED":
                self._tell("finished", reason, when)
            elif status == "FAILED" and "not finite" in reason:
                self._tell("nan", reason, when)
            elif body.get("killed") or (status == "FAILED" and body.get("final", True)):
                self._tell("failed", reason, when)

    def _tell(self, event: str, reason: str, when: float, topic: str = "") -> None:
        settings = self._settings
        assert settings is not None
        key = f"{self._attempt}:{event}" + (f":{topic}" if topic else "")
        told = self._told()
        old = self._clock() - when > _OLD_S
        if event not in settings.on or key in told or key in self._refused or old:
            return
        self._note({**told, key: self._clock()})
        problem = self._send(settings, event, reason)
        if problem:
            self._refused.add(key)
            self._note(told)
            log.warning("the webhook did not take the message that the run %s: %s", event, problem)

    def _send(self, settings: AlertSettings, event: str, reason: str) -> str:
        url = os.environ.get(settings.variable)
        if not url:
            return f"{settings.variable} is not set here"
        name = Meta.read(self._run_dir).run_name
        said = {
            "idle": "is idle",
            "nan": "has a number that is not finite",
            "note": "looks wrong",
            "stalled": "is stalled",
        }
        title = f"{name} {said.get(event, f'has {event}')}"
        pages = pages_of(self._run_dir)
        page = pages[0] if pages and "127.0.0.1" not in pages[0] else ""
        text = mask(
            "\n".join(filter(None, (reason, f"step {self._step}", str(self._run_dir), page)))
        )
        facts = {
            "event": event,
            "run": name,
            "reason": mask(reason),
            "step": self._step,
            "attempt": self._attempt,
            "path": str(self._run_dir),
            "page": page,
        }
        return send(url, kind_of(url), title, text, facts)

    def _told(self) -> dict[str, float]:
        return read_known(dict[str, Time], self._notified, parts=2) or {}

    def _note(self, told: dict[str, float]) -> None:
        try:
            write_atomically(self._notified, json.dumps(told) + "\n")
        except OSError as error:  # a full disk: once more is better than not at all
            log.warning("%s: %s", self._notified, error)

    @property
    def _notified(self) -> Path:
        return journal_path(self._run_dir).with_name("notified.json")


def kind_of(url: str) -> str:
    """Return the kind of webhook that an address is of, by its host; "json" for an unknown one."""
    host = urllib.parse.urlsplit(url).hostname or ""
    for kind, names in _HOSTS.items():
        if any(host == name or host.endswith(f".{name}") for name in names):
            return kind
    return "ntfy" if host.startswith("ntfy.") else "json"


def send(url: str, kind: str, title: str, text: str, facts: Mapping[str, Any]) -> str:
    """Send a message; return "", or why it was not taken, without the address."""
    body, headers = _message(kind, printable(mask(title)), harmless(text), facts)
    try:
        if urllib.parse.urlsplit(url).scheme not in ("http", "https"):
            return "the address begins neither with http:// nor with https://"
        request = urllib.request.Request(url, body, headers, method="POST")
        opener = urllib.request.build_opener(_NoRedirect)
        with opener.open(request, timeout=_TIMEOUT) as answer:
            answer.read(1)
    except urllib.error.HTTPError as error:
        with error:
            said = error.read(200).decode(errors="replace")
        return mask(f"HTTP {error.code} {' '.join(said.split())}").replace(url, "***").strip()
    except (OSError, http.client.HTTPException, ssl.SSLError, ValueError) as error:
        reason = getattr(error, "reason", error)
        return mask(f"{type(error).__name__}: {reason}").replace(url, "***")
    return ""


def _message(
    kind: str, title: str, text: str, facts: Mapping[str, Any]
) -> tuple[bytes, dict[str, str]]:
    content: Any
    if kind == "ntfy":
        # A header has no letters beyond latin-1; the title is a name of a run and an event.
        head = title.encode("ascii", "replace").decode()
        return text.encode(), {"Title": head, "Content-Type": "text/plain; charset=utf-8"}
    if kind == "slack":
        content = {"text": html.escape(f"*{title}*\n{text}", quote=False)}  # no links, no @channel
    elif kind == "discord":
        content = {"content": f"**{title}**\n{text}"[:2000], "allowed_mentions": {"parse": []}}
    elif kind == "teams":
        blocks = [
            {"type": "TextBlock", "weight": "bolder", "text": title, "wrap": True},
            {"type": "TextBlock", "text": text.replace("\n", "\n\n"), "wrap": True},
        ]
        card = {"type": "AdaptiveCard", "version": "1.4", "body": blocks}
        kind_of_card = "application/vnd.microsoft.card.adaptive"
        content = {
            "type": "message",
            "attachments": [{"contentType": kind_of_card, "content": card}],
        }
    else:
        content = {"title": title, "text": text, **facts}
    return json.dumps(content).encode(), {"Content-Type": "application/json"}


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Refuses redirects: the message is for the server that the user has named."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        """Follow nothing."""
