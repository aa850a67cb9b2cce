"""The journal, from which MLflow gets everything, and other trackers beside it.

The journal comes first in everything. What goes wrong in another tracker costs only that one.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from functools import update_wrapper
from pathlib import Path
from typing import Any

from hpctrain.base.secrets import mask
from hpctrain.tracking.journal import journal_path, read_all
from hpctrain.tracking.tracker import JournalTracker, OtherTracker, Status, Tracker, public

log = logging.getLogger(__name__)

_IMAGE = re.compile(r"artifacts/images/(?P<key>.+?)\+step\+(?P<step>\d+)\+")


def _passed_on(method: str, told: Callable[..., Any] | None = None, *, steps: bool = False) -> Any:
    """Return a method that calls that of the journal, and then those of the other trackers.

    The others get what `told` returns of the argument, or the arguments. With `steps` the last
    argument is a step.
    """

    def call(self: SeveralTrackers, *given: Any, **named: Any) -> None:
        getattr(self._journal, method)(*given, **named)
        if steps:
            self._tell_step(named["step"] if "step" in named else given[-1])
        if told is None:
            self._tell(method, *given, **named)
        else:
            self._tell(method, told(*given, *named.values()))

    return update_wrapper(call, getattr(Tracker, method))


class SeveralTrackers(Tracker):
    """A tracker that passes on what it gets: to the journal, then to other trackers.

    It sets the attributes of the other trackers.
    """

    def __init__(
        self,
        journal: JournalTracker,
        others: Sequence[OtherTracker],
        run_dir: Path,
        run_name: str,
        uid: str,
    ) -> None:
        self._journal, self._others = journal, list(others)
        self._run_dir = run_dir.absolute()
        self._logged: dict[str, int] = {}
        self._go_on = True  # whether the next metric is the first one after a start or a resume
        for other in others:
            other.run_dir, other.run_name, other.uid = self._run_dir, run_name, uid

    def start(self, params: Mapping[str, Any], tags: Mapping[str, str]) -> None:
        """Begin an attempt."""
        self._journal.start(params, tags)
        self._tell("start", public(params), public(tags))

    log_params = _passed_on("log_params", public)
    log_tags = _passed_on("log_tags", public)
    log_metrics = _passed_on("log_metrics", steps=True)
    log_image = _passed_on("log_image", steps=True)
    log_figure = _passed_on("log_figure", steps=True)
    log_dataset = _passed_on("log_dataset")
    log_file = _passed_on("log_file")
    log_time = _passed_on("log_time")
    sync = _passed_on("sync")

    def log_note(self, topic: str, text: str, step: int) -> None:
        """Record what looks wrong."""
        self._journal.log_note(topic, text, step)
        self._tell("log_tags", public({f"hpctrain.note.{topic}": text}))

    def position(self) -> int:
        """Return the position in the journal."""
        return self._journal.position()

    def rewind(self, position: int) -> None:
        """After a resume, mark the metrics logged since `position` as superseded."""
        self._logged = _logged_since(self._run_dir, position)
        self._go_on = True
        self._journal.rewind(position)

    def finish(self, status: Status, reason: str = "", *, final: bool = True) -> None:
        """End the attempt."""
        self._journal.finish(status, reason, final=final)
        self._tell("finish", status, mask(reason), final=final)

    def _tell_step(self, step: int) -> None:
        if self._go_on:
            self._go_on = False
            again = {key: last for key, last in self._logged.items() if last >= step}
            self._tell("rewind_to", step, again)

    def _tell(self, method: str, *given: Any, **named: Any) -> None:
        for other in [*self._others]:
            try:
                getattr(other, method)(*given, **named)
            except Exception as error:
                self._others.remove(other)
                text = mask(" ".join(f"{type(error).__name__}: {error}".split())[:500])
                name = type(other).__name__
                log.warning("tracking.also: %s: %s; the run goes on without it", name, text)


def _logged_since(run_dir: Path, position: int) -> dict[str, int]:
    """Return the last step of each metric and image in the journal from `position` on."""
    found: dict[str, int] = {}
    for record in read_all(journal_path(run_dir), position):
        body = record.body
        if body["kind"] == "metrics":
            for key in body["metrics"]:
                found[key] = max(found.get(key, -1), body["step"])
        elif body["kind"] == "artifact" and (image := _IMAGE.match(str(body["file"]))):
            key = image["key"].replace("~", "/")
            found[key] = max(found.get(key, -1), int(image["step"]))
    return found
