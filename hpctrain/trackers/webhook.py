"""Messages to people about a run, by a webhook of Slack, Discord, ntfy, Teams, or any server.

    finish("FAILED")      failed, or nan if a number was not finite
    finish("FINISHED")    finished
    a metric              nan, if it is not finite
    a note                note, once for each topic

Slurm's mail (`site.sbatch={mail-type: [FAIL]}`) tells of a job that was killed, when no process of
the run is there to tell anything.
"""

import html
import http.client
import json
import logging
import math
import os
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Any

from hpctrain.base.errors import ConfigError
from hpctrain.base.secrets import mask
from hpctrain.base.terminal.terminal import harmless, printable
from hpctrain.tracking.tracker import OtherTracker, Status

log = logging.getLogger(__name__)

_TIMEOUT = 5.0  # seconds
_TITLES = {
    "failed": "has failed",
    "finished": "has finished",
    "nan": "has a number that is not finite",
    "note": "looks wrong",
}
_HOSTS = {
    "slack": ("hooks.slack.com", "hooks.slack-gov.com"),
    "discord": ("discord.com", "discordapp.com"),
    "ntfy": ("ntfy.sh",),
    "teams": ("webhook.office.com", "logic.azure.com", "api.powerplatform.com"),
}


class Webhook(OtherTracker):
    """Tell people what has happened, each event once per attempt.

    Args:
        variable: The variable of the environment that holds the address, which is a secret; jobs
            inherit it.
        on: The events that are told: failed, finished, nan, note.

    Raises:
        ConfigError: The variable is not set, or an event is unknown.
    """

    def __init__(self, variable: str = "HPCTRAIN_WEBHOOK", on: Sequence[str] = (*_TITLES,)) -> None:
        if unknown := [each for each in on if each not in _TITLES]:
            raise ConfigError(f"on={unknown[0]}: allowed are {', '.join(_TITLES)}")
        self._url = os.environ.get(variable, "")
        if not self._url.startswith(("https://", "http://")):
            raise ConfigError(f"variable={variable}: export it with an address, https://...")
        self._on, self._told, self._step = on, set[tuple[str, str]](), 0

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Tell of a metric that is not finite."""
        self._step = step
        wrong = [f"{key} is {x}" for key, x in metrics.items() if not math.isfinite(float(x))]
        if wrong:
            self._tell("nan", ", ".join(wrong))

    def log_tags(self, tags: Mapping[str, str]) -> None:
        """Tell of notes, which other trackers get as tags."""
        for key, text in tags.items():
            if key.startswith("hpctrain.note.") and text:
                self._tell("note", text, key)

    def finish(self, status: Status, reason: str = "", *, final: bool = True) -> None:
        """Tell how the run has ended, if it does not go on."""
        if status == "FINISHED":
            self._tell("finished", reason)
        elif status == "FAILED" and final:
            self._tell("nan" if "not finite" in reason else "failed", reason)

    def _tell(self, event: str, reason: str, topic: str = "") -> None:
        if event not in self._on or (event, topic) in self._told:
            return
        self._told.add((event, topic))
        facts = {"event": event, "run": self.run_name, "reason": mask(reason), "step": self._step}
        text = mask("\n".join(filter(None, (reason, f"step {self._step}", str(self.run_dir)))))
        title = f"{self.run_name} {_TITLES[event]}"
        if problem := send(self._url, kind_of(self._url), title, text, facts):
            log.warning("the webhook did not take the message that the run %s: %s", event, problem)


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
        request = urllib.request.Request(url, body, headers, method="POST")
        opener = urllib.request.build_opener(_NoRedirect)
        with opener.open(request, timeout=_TIMEOUT) as answer:
            answer.read(1)
    except urllib.error.HTTPError as error:
        with error:
            said = error.read(200).decode(errors="replace")
        return mask(f"HTTP {error.code} {' '.join(said.split())}").replace(url, "***").strip()
    except (OSError, http.client.HTTPException, ValueError) as error:
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
            {"type": "TextBlock", "text": each.replace("\n", "\n\n"), "wrap": True}
            for each in (title, text)
        ]
        card = {"type": "AdaptiveCard", "version": "1.4", "body": blocks}
        form = "application/vnd.microsoft.card.adaptive"
        content = {"type": "message", "attachments": [{"contentType": form, "content": card}]}
    else:
        content = {"title": title, "text": text, **facts}
    return json.dumps(content).encode(), {"Content-Type": "application/json"}


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Refuses redirects: the message is for the server that the user has named."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        """Follow nothing."""
