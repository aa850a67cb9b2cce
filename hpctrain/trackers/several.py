"""The journal, from which MLflow gets everything, and other trackers beside it.

The journal comes first in everything. What goes wrong in another tracker costs only that one.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hpctrain.secrets import mask
from hpctrain.trackers.other import OtherTracker
from hpctrain.tracking.journal import journal_path, read_all
from hpctrain.tracking.tracker import JournalTracker, Status, Tracker, flatten, public

log = logging.getLogger(__name__)

_IMAGE = re.compile(r"artifacts/images/(?P<key>.+?)\+step\+(?P<step>\d+)\+")


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
        self._tell("start", public(flatten(params)), public(tags))

    def log_params(self, params: Mapping[str, Any]) -> None:
        """Record params that are known only after the start."""
        self._journal.log_params(params)
        self._tell("log_params", public(flatten(params)))

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Record the metrics of a step."""
        self._journal.log_metrics(metrics, step)
        self._tell_step(step)
        self._tell("log_metrics", metrics, step)

    def log_tags(self, tags: Mapping[str, str]) -> None:
        """Record tags."""
        self._journal.log_tags(tags)
        self._tell("log_tags", public(tags))

    def log_dataset(self, facts: Mapping[str, Any]) -> None:
        """Record a data set."""
        self._journal.log_dataset(facts)
        self._tell("log_dataset", facts)

    def log_image(self, key: str, image: Any, step: int) -> None:
        """Record an image."""
        self._journal.log_image(key, image, step)
        self._tell_step(step)
        self._tell("log_image", key, image, step)

    def log_figure(self, key: str, figure: Any, step: int) -> None:
        """Record a figure."""
        self._journal.log_figure(key, figure, step)
        self._tell_step(step)
        self._tell("log_figure", key, figure, step)

    def log_file(self, file: Path) -> None:
        """Record a file."""
        self._journal.log_file(file)
        self._tell("log_file", file)

    def log_model(self) -> None:
        """Record that the trained model belongs to the run."""
        self._journal.log_model()
        self._tell("log_model")

    def log_note(self, topic: str, text: str, step: int) -> None:
        """Record what looks wrong."""
        self._journal.log_note(topic, text, step)
        self._tell("log_tags", public({f"hpctrain.note.{topic}": text}))

    def log_time(self, seconds: Mapping[str, float], step: int, device_s: float) -> None:
        """Record where the time of this attempt went until now."""
        self._journal.log_time(seconds, step, device_s)
        self._tell("log_time", seconds, step, device_s)

    def position(self) -> int:
        """Return the position in the journal."""
        return self._journal.position()

    def rewind(self, position: int) -> None:
        """After a resume, mark the metrics logged since `position` as superseded."""
        self._logged = _logged_since(self._run_dir, position)
        self._go_on = True
        self._journal.rewind(position)

    def sync(self) -> None:
        """Call fsync on the journal, and let the others write what they hold back."""
        self._journal.sync()
        self._tell("sync")

    def finish(
        self,
        status: Status,
        reason: str = "",
        end_time: float | None = None,
        *,
        final: bool = True,
    ) -> None:
        """End the attempt."""
        self._journal.finish(status, reason, end_time, final=final)
        self._tell("finish", status, mask(reason), end_time, final=final)

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
