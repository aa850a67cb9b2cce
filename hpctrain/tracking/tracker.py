"""The tracker: the interface through which the trainer records params, metrics and the outcome.

    tracker: Tracker = JournalTracker(run_dir, Meta(uri, experiment, run_name, uid))
    tracker.start(params=config, tags={"git.commit": "..."})
    tracker.rewind(checkpoint.tracker_position)      # after a resume, before the first metric
    tracker.log_metrics({"loss": 0.7}, step=1)       # about 10 us: one line in the journal
    tracker.sync(); position = tracker.position()    # the checkpoint stores it
    tracker.finish("FINISHED")

Rank 0 has a `JournalTracker`, every other rank a `Tracker`. Neither imports mlflow: a separate
process, the `uploader`, uploads the journal. The training does not notice if it is slow or dies.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from hpctrain.base import secrets
from hpctrain.base.errors import TrackingError
from hpctrain.base.files.yaml_file import flat
from hpctrain.base.processes.child import Process
from hpctrain.tracking.journal import Journal
from hpctrain.tracking.journal_line import encode
from hpctrain.tracking.meta import Meta
from hpctrain.tracking.page import images
from hpctrain.tracking.store import check_uri, clean_key, resolve_uri
from hpctrain.tracking.uploading.child_uploader import ChildUploader

log = logging.getLogger(__name__)

# As MLflow has them: SCHEDULED is a trial of a search that waits at a rung, perhaps for ever.
Status = Literal["FINISHED", "FAILED", "KILLED", "SCHEDULED"]


class Tracker:
    """The interface of a tracker. What a tracker does not override does nothing."""

    def start(self, params: Mapping[str, Any], tags: Mapping[str, str]) -> None:
        """Begin an attempt."""

    def log_params(self, params: Mapping[str, Any]) -> None:
        """Record params that are known only after the start."""

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Record the metrics of a step."""

    def log_tags(self, tags: Mapping[str, str]) -> None:
        """Record tags, which a later record may change."""

    def log_dataset(self, facts: Mapping[str, Any]) -> None:
        """Record a data set that the run reads; see `JournalTracker.log_dataset`."""

    def log_image(self, key: str, image: Any, step: int) -> None:
        """Record an image: a path, an image of Pillow, or an array (height, width[, colours])."""

    def log_figure(self, key: str, figure: Any, step: int) -> None:
        """Record a figure of matplotlib as an image."""

    def log_file(self, file: Path) -> None:
        """Record a file below `artifacts/` of the run directory."""

    def log_note(self, topic: str, text: str, step: int) -> None:
        """Record what looks wrong at a step; "" takes back what was said about the topic."""

    def log_time(self, seconds: Mapping[str, float], step: int, device_s: float) -> None:
        """Record the seconds of this attempt by part, which add up to those since it began.

        `device_s` is the seconds of this attempt and those before, times their devices.
        """

    def position(self) -> int:
        """Return the position in the journal, which a checkpoint stores for `rewind`."""
        return 0

    def rewind(self, position: int) -> None:
        """After a resume, mark the metrics logged since `position` as superseded."""

    def sync(self) -> None:
        """Call fsync: after this everything recorded so far is on the disk."""

    def finish(self, status: Status, reason: str = "", *, final: bool = True) -> None:
        """End the attempt with a status and a reason.

        It is not final if the batch script decides whether the run goes on: nobody is told yet.
        """


class OtherTracker(Tracker):
    """Base class of a tracker beside MLflow. Override the methods of which it shall know.

        class Lines(OtherTracker):
            def log_metrics(self, metrics, step):
                print(step, *metrics.items())

    Rank 0 makes it once for each attempt, and calls it from the thread that trains: a method must
    return soon. If a method raises an exception, the run goes on without this tracker.

    Attributes:
        run_dir: The run directory; absolute.
        run_name: The name of the run in MLflow.
        uid: Our id of the run, which is the same in all attempts: 32 hexadecimal digits.
    """

    run_dir: Path
    run_name: str
    uid: str

    def rewind_to(self, step: int, logged: Mapping[str, int]) -> None:
        """Learn that the metrics go on at `step`, after a resume or a rollback.

        It is called before the first metric or image of an attempt, too.

        Args:
            step: The first step that will be logged.
            logged: For each metric that was logged at `step` or later before, the last such step.
        """


class JournalTracker(Tracker):
    """A tracker that writes the journal and keeps an uploader process running.

    `meta` is where the run goes. Without `upload`, `hpctrain status --upload` uploads later.
    `finish` waits `drain` seconds for the uploader. `check` ends the process if it may no longer
    write (see `Journal`).
    """

    def __init__(
        self,
        run_dir: Path,
        meta: Meta,
        *,
        upload: bool = True,
        drain: float = 10.0,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self._run_dir = run_dir.absolute()
        self._uri = resolve_uri(meta.uri, Path.cwd())  # the uploader works in another folder
        self._uploader = ChildUploader(self._run_dir, self._uri, drain) if upload else None
        self._finished = False
        self._rewound = False
        self._logged = False
        self._names: dict[str, str] = {}  # of the metrics so far, with those in MLflow
        self._journal = Journal(self._run_dir, check=check)
        self.attempt = self._journal.attempt
        replace(meta, uri=self._uri).write(self._run_dir)

    def start(self, params: Mapping[str, Any], tags: Mapping[str, str]) -> None:
        """Begin an attempt: record process, params and tags, and start the uploader."""
        self._journal.append("status", status="RUNNING", **Process.current()._asdict())
        if params:
            self.log_params(params)
        if tags:
            self.log_tags(tags)
        self._journal.sync()
        if self._uploader:
            try:
                check_uri(self._uri)
            except TrackingError as error:
                # Submission has checked it too, but a compute node can have other mounts.
                log.warning("%s; metrics stay in %s", error, self._journal.path)
            else:
                self._uploader.start()

    def log_params(self, params: Mapping[str, Any]) -> None:
        """Record params; nested ones get dotted names.

        If a later attempt records another value, MLflow keeps the first one, and the new one is
        the tag `hpctrain.changed.KEY`.
        """
        self._journal.append("params", params=public(params))

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Record the metrics of a step, with one write and no fsync.

        If `rewind` was not called before, the attempt starts over: all older metrics are
        superseded.
        """
        if not self._rewound:
            self.rewind(0)
        self._logged = True
        if not self._names.keys() >= metrics.keys():
            self._learn_names(metrics)
        values = {name: encode(value) for name, value in metrics.items()}
        self._journal.append("metrics", step=int(step), metrics=values)

    def _learn_names(self, metrics: Mapping[str, float]) -> None:
        """Say which new names are others in MLflow, and which become one there."""
        told = []
        for name in metrics:
            if name in self._names:
                continue
            there = clean_key(name)
            same = next((each for each, other in self._names.items() if other == there), None)
            self._names[name] = there
            if same is not None:
                told.append(f"{name} is {there}, as {same} is, so their values are mixed there")
            elif there != name:
                told.append(f"{name} is {there}")
        if told:
            log.warning("MLflow does not take these names of metrics: %s", ", ".join(told))
            renamed = (f"{name} is {there}" for name, there in self._names.items() if name != there)
            self.log_tags({"hpctrain.renamed": "; ".join(renamed)})

    def log_tags(self, tags: Mapping[str, str]) -> None:
        """Record tags, without the secrets in them."""
        self._journal.append("tags", tags=public(tags))

    def log_dataset(self, facts: Mapping[str, Any]) -> None:
        """Record a data set that the run reads.

        Args:
            facts: JSON values: `name`, `digest`, `source` (a path or URL), `context` (what for),
                `samples` (their number by split), and `fields` (`dtype` and `shape` by name).
        """
        source = secrets.mask(secrets.reference(str(facts["source"])))
        self._journal.append("dataset", **{**facts, "source": source})

    def log_image(self, key: str, image: Any, step: int) -> None:
        """Write an image, for MLflow's grid of images; see `images.save_image`."""
        self._record_files(partial(images.save_image, self._run_dir, key, image, int(step)))

    def log_figure(self, key: str, figure: Any, step: int) -> None:
        """Write a figure of matplotlib as an image."""
        self._record_files(partial(images.save_figure, self._run_dir, key, figure, int(step)))

    def log_file(self, file: Path) -> None:
        """Record a file below `artifacts/`, which must stay there, or it is a ValueError.

        It gets the same place in the store.
        """
        inside = file.absolute().relative_to(self._run_dir)
        folder = inside.parent.relative_to("artifacts")
        self._journal.append("artifact", file=str(inside), to=str(folder))

    def log_note(self, topic: str, text: str, step: int) -> None:
        """Record what looks wrong; it becomes a tag."""
        self._journal.append("note", topic=topic, text=secrets.mask(text), step=int(step))

    def _record_files(self, write: Callable[[], list[Path]]) -> None:
        try:
            files = write()
        except OSError as error:  # a full disk costs an image, and not the run
            log.warning("an image is lost: %s", error)
            return
        for file in files:
            self.log_file(file)

    def log_time(self, seconds: Mapping[str, float], step: int, device_s: float) -> None:
        """Record where the time of this attempt went until now; MLflow does not get it."""
        rounded = {part: round(value, 3) for part, value in seconds.items()}
        self._journal.append("time", step=int(step), seconds=rounded, device_s=round(device_s, 3))

    def position(self) -> int:
        """Return the position in the journal. Call `sync` before you store it."""
        return self._journal.position

    def rewind(self, position: int) -> None:
        """After a resume, mark the metrics logged since `position` as superseded."""
        self._rewound = True
        if self.attempt > 1 or self._logged:
            self._journal.rewind(position)

    def sync(self) -> None:
        """Call fsync on the journal; restart the uploader if it was killed."""
        self._journal.sync()
        if self._uploader:
            self._uploader.revive()

    def finish(self, status: Status, reason: str = "", *, final: bool = True) -> None:
        """End the attempt; wait up to `drain` seconds until everything is in the store.

        Ctrl-C and SIGTERM end the wait.
        """
        if self._finished:
            return
        self._finished = True
        ended = {"status": status, "reason": secrets.mask(reason)}
        self._journal.append("status", **ended, **({} if final else {"final": False}))
        self._journal.close()
        if self._uploader:
            self._uploader.revive()
            self._uploader.wait()


def public(values: Mapping[str, Any]) -> dict[str, str]:
    """Return the values as text by dotted key, without the secrets: others can read the store.

    A list or an empty mapping is one value.
    """
    known = secrets.known()
    return {
        key: secrets.mask(secrets.reference(str(value), values=known))
        for key, value in flat(values).items()
    }
