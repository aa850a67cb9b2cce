"""One message to a webhook, in the form of its service. This uses only the standard library."""

import html
import http.client
import json
import ssl
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from typing import Any

from hpctrain.base.secrets import mask
from hpctrain.base.terminal.terminal import harmless, printable

_TIMEOUT = 5.0  # seconds
_HOSTS = {
    "slack": ("hooks.slack.com", "hooks.slack-gov.com"),
    "discord": ("discord.com", "discordapp.com"),
    "ntfy": ("ntfy.sh",),
    "teams": ("webhook.office.com", "logic.azure.com", "api.powerplatform.com"),
}


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
