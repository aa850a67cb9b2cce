"""The upload of a journal to MLflow, which can be interrupted anywhere and continued.

It continues at the position in the store, so that each value is stored exactly once.
"""

import dataclasses
import logging
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path

from hpctrain.base.errors import DamageError
from hpctrain.base.files.lock import file_lock
from hpctrain.base.names.metric_names import main_metric
from hpctrain.base.names.run_record import Progress
from hpctrain.tracking.final_status import UNRECORDED
from hpctrain.tracking.journal import JournalRecord, journal_path, read, read_all
from hpctrain.tracking.meta import Meta, Uploaded, check_known
from hpctrain.tracking.uploading.journal_facts import JournalFacts
from hpctrain.tracking.uploading.mlrun import BATCH, DeletedError, MlflowRun, Point
from hpctrain.tracking.uploading.nodes import Nodes, SystemMetrics
from hpctrain.tracking.uploading.publish import publish

log = logging.getLogger(__name__)


class GaveUp(Exception):
    """The store did not answer for longer than the upload may wait."""


class Upload:
    """The upload of one journal, each value exactly once.

    `pause` is called between two tries with a number of seconds: it sleeps, or raises to give up.
    `connected` is called when MLflow has started.
    Without a `uri` the store in `meta.json` is used, if the user knows it (`check_known`); a run
    that may be somebody else's is a TrackingError. Everything up to `position` is in the store, and
    `points` is how many values this object has uploaded. `journal` is what the journal says.
    """

    def __init__(
        self,
        run_dir: Path,
        pause: Callable[[float], None],
        uri: str | None = None,
        connected: Callable[[], None] = lambda: None,
    ) -> None:
        self.run_dir, self._uri = run_dir, uri
        self._path = journal_path(run_dir)
        self._pause, self._connected = pause, connected
        self._meta = self._read_meta()
        self._run: MlflowRun | None = None
        self._batch: list[Point] = []
        self._system = SystemMetrics(run_dir, {})
        self._files = 0  # the position before which the files of all records are stored
        self._place_is_away = False
        self._nodes = Nodes(run_dir)
        self.position = 0
        self.points = 0
        self._next_note = 0.0  # on the monotonic clock
        self.journal = JournalFacts(run_dir)

    def drain(self) -> None:
        """Upload everything that is in the journal now.

        After a DeletedError (the run is deleted in MLflow) a later call continues at `position`.
        """
        try:
            self._drain()
        except DeletedError as error:
            self._write_uploaded(error.run_id, str(error))
            raise

    def _drain(self) -> None:
        self._batch = []  # what a call that was interrupted has left is after `position`
        end = self.journal.scan()
        beside = self._system.is_new or self._files_are_due
        if end == self.position and self._run and not beside:
            return
        meta = self._read_meta()
        if meta.parent_uid != self._meta.parent_uid:  # a sweep has adopted the run
            self._meta, self._run = meta, None
        run = self._open()
        for record in read_all(self._path, self.position, end):
            if record.body["kind"] == "metrics":
                points = self.journal.points(record)
                if len(self._batch) + len(points) >= BATCH:
                    self._flush(run, record.start)
                self._batch += points
            elif record.body["kind"] != "time":  # that one is for reports; a batch goes on
                self._flush(run, record.start)
                self._log_other(run, record)
                self.position = record.end
        self._flush(run, end)
        self.points += self._system.upload(run, end)
        if tags := self._nodes.new_tags():
            run.log_tags(tags, end)
        if self.journal.ended:
            self._tell_sweep(run)
        self._write_uploaded(run.run_id)
        if self._files_are_due:
            self._publish(run)

    def _publish(self, run: MlflowRun) -> None:
        """Publish the files of new records.

        A place that is not there can take minutes to say so. So it is asked again only after the
        end of the training; then a file that it does not take holds up no other.
        """
        failed = False
        for record in read_all(self._path, self._files, self.position):
            if not publish(run, self.run_dir, record.body):
                failed = self._place_is_away = True
                if not self.journal.ended:
                    return
            elif not failed:
                self._files = record.end
        if not failed:
            self._files = self.position
        self._write_uploaded(run.run_id)

    @property
    def left(self) -> str:
        """Say that the place of the artifacts has not taken all files; "" if it has."""
        return "files of the run are not in MLflow yet" if self._files < self.position else ""

    @property
    def _files_are_due(self) -> bool:
        away = self._place_is_away and not self.journal.ended
        return self._files < self.position and not away

    def close_killed(self) -> None:
        """Set the status KILLED, with the time of the last record as the end time."""
        run = self._open()
        log.info("KILLED: %s", UNRECORDED)
        run.set_ended("KILLED", self.journal.last_time)
        run.log_tags({"hpctrain.reason": UNRECORDED}, self.position)

    def _tell_sweep(self, run: MlflowRun) -> None:
        with suppress(DamageError):
            progress = Progress.of(self.run_dir)
            run.tell_parent(main_metric(progress.metric, progress.metrics))

    def _read_meta(self) -> Meta:
        meta = Meta.read(self.run_dir)
        if self._uri is not None:
            return dataclasses.replace(meta, uri=self._uri)
        check_known(meta, self.run_dir)
        return meta

    def _open(self) -> MlflowRun:
        if self._run is None:
            records, _ = read(self._path, 0, limit=1)
            start = records[0].body["time"] if records else time.time()
            with self._sweep_lock():
                self._run = MlflowRun(self._meta, start, self._pause, self._connected)
            self.position = self._run.position
            self._system = SystemMetrics(self.run_dir, self._run.tags)
            note = Uploaded.read(self.run_dir)
            if note is None or (note.uri, note.run_id) != (self._meta.uri, self._run.run_id):
                note = None  # of another run
            self._files = note.files_stored if note else 0
            log.info("run %s, from byte %d", self._run.run_id, self.position)
        return self._run

    def _sweep_lock(self) -> AbstractContextManager[int | None]:
        """Return the lock under which one run of a sweep creates the parent of all of them."""
        if self._meta.parent_uid is None:
            return nullcontext()
        # The runs of a sweep are in one folder.
        path = self.run_dir.absolute().parent / f".{self._meta.parent_uid}.lock"
        return file_lock(path, lambda: self._pause(0.2))

    def _log_other(self, run: MlflowRun, record: JournalRecord) -> None:
        body = record.body
        if body["kind"] == "params":
            run.log_params(body["params"], record.end)
            return
        if body["kind"] == "status" and body["status"] == "RUNNING":
            run.set_running()
        elif body["kind"] == "status":
            run.set_ended(body["status"], body["time"])
        # What has no tags, such as an artifact or a record of a newer version, only moves on.
        run.log_tags(self.journal.tags(record), record.end)

    def _flush(self, run: MlflowRun, position: int) -> None:
        """Upload the waiting metrics, which are all before `position`."""
        if self._batch:
            run.log_points(self._batch, position)
            self.points += len(self._batch)
            self._batch = []
        self.position = position
        if time.monotonic() > self._next_note:  # people are told how much is left
            self._write_uploaded(run.run_id)

    def _write_uploaded(self, run_id: str, problem: str = "") -> None:
        uri, uid, parent = self._meta.uri, self._meta.uid, self._meta.parent_uid
        experiment_id = self._run.experiment_id if self._run else ""
        note = Uploaded(
            *(uri, uid, experiment_id, run_id, self.position, parent, problem),
            samples=self._system.positions,
            files=self._files,
        )
        note.write(self.run_dir)
        self._next_note = time.monotonic() + 1.0


def upload_lock(run_dir: Path, wait: Callable[[], None]) -> AbstractContextManager[int | None]:
    """Return the lock that lets only one uploader at a time work on a run."""
    return file_lock(journal_path(run_dir).with_name("upload.lock"), wait, parts=2)
