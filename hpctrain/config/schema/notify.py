"""The keys of `notify`."""

from __future__ import annotations

from dataclasses import dataclass

from hpctrain.config.schema.key import key

EVENTS = ("failed", "stalled", "nan", "note", "idle", "finished")


@dataclass
class NotifyConfig:
    """Messages to people about a run, by a webhook. The uploader's process sends them."""

    url: str | None = key(
        None,
        "Messages go to this webhook of Slack, Discord, ntfy or Teams, or to any server that takes "
        "JSON; its host says which. It is a secret: say ${oc.env:HPCTRAIN_WEBHOOK}, and export "
        "that variable.",
    )
    on: list[str] = key(
        [*EVENTS],
        "These events are told: the run has failed or was killed, it logs nothing for "
        "half an hour, a metric is not finite, something looks wrong (train.watch, or a slow "
        'rank), its devices are idle, it has finished. In a file write "on".',
        choices=EVENTS,
    )
