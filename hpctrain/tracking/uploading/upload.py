"""The upload of a journal to MLflow, which can be interrupted anywhere and continued.

It continues at the position in the store, so that each value is stored exactly once. A resumed
attempt often logs a metric again with the same value. The upload then sends the time of the first
logging, so that MLflow recognizes the point and does not store it twice.
"""

import dataclasses
import logging
import os
import pwd
import shlex
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from hpctrain.errors import TrackingError
from hpctrain.lock import file_lock
from hpctrain.secrets import mask
from hpctrain.tracking.final_status import UNRECORDED, with_cause
from hpctrain.tracking.journal import Record, decode, journal_path, read, read_all
from hpctrain.tracking.meta import Meta, Uploaded, files_left
from hpctrain.tracking.page.nodes import Nodes
from hpctrain.tracking.page.sweep_table import Row
from hpctrain.tracking.uploader_process import Process
from hpctrain.tracking.uploading.beside_journal import EvaluationMetrics, SystemMetrics
from hpctrain.tracking.uploading.mlrun import BATCH, DeletedError, MlflowRun, Point, stored
from hpctrain.tracking.uploading.publish import KINDS, publish, tolerant
from hpctrain.tracking.uploading.sweep_summary import SweepSummary
from hpctrain.tracking.uploading.waiting_files import WaitingFiles

log = logging.getLogger(__name__)

_NOTE = "mlflow.note.content"


class GaveUp(Exception):
    """The store did not answer for longer than the upload may wait."""


class Upload:
    """The upload of one journal, each value exactly once.

    `pause` is called between two tries with a number of seconds: it sleeps, or raises to give up.
    Without a `uri` the store in `meta.json` is used, if the user knows it (`check_known`); a run
    that may be somebody else's is a TrackingError. Everything up to `position` is in the store.
    `ended` tells whether the newest attempt, whose process is `writer`, has written its final
    status, and `points` how many values this object has uploaded.
    """

    def __init__(
        self, run_dir: Path, pause: Callable[[float], None], uri: str | None = None
    ) -> None:
        self.run_dir, self._uri = run_dir, uri
        self._path = journal_path(run_dir)
        self._pause = pause
        self._meta = self._read_meta()
        self._run: MlflowRun | None = None
        self._batch: list[Point] = []
        self._system = SystemMetrics(run_dir)
        self._evaluations = EvaluationMetrics(run_dir)
        self._nodes = Nodes(run_dir)
        self._summary = SweepSummary(run_dir)
        self._status, self._why = "RUNNING", ""
        self._shown, self._has_view = "", False
        self.position = 0
        self.ended = False
        self.writer: Process | None = None
        self.points = 0
        self._files = WaitingFiles(run_dir)
        self._next_note = 0.0  # on the monotonic clock
        self._scanned = 0  # the position up to which `scan` has read
        self._last_time = 0.0
        self._superseded: list[tuple[int, int]] = []  # positions from, to
        self._superseded_steps: list[str] = []  # for people
        self._first_time: dict[tuple[str, int, float | str], float] = {}  # by key, step, value
        self.scan()

    @property
    def writer_here(self) -> bool:
        """Whether the newest attempt is of this host; on another it has its own uploader."""
        return self.writer is not None and self.writer.here

    @property
    def writer_died(self) -> bool:
        """Whether the newest attempt has died on this host without a final status."""
        if self.ended or self.writer is None:
            return False
        return self.writer.died_here

    def scan(self) -> int:
        """Read the states and superseded ranges in the new part of the journal; return its end."""
        while True:
            records, end = read(self._path, self._scanned)
            for record in records:
                self._last_time = max(self._last_time, record.body["time"])
                if record.body["kind"] == "status":
                    self._learn_status(record)
                elif record.body["kind"] == "superseded":
                    self._learn_superseded(record)
            if end == self._scanned:
                return end
            self._scanned = end

    def drain(self) -> int:
        """Upload everything that is in the journal now; return the number of new bytes.

        After a DeletedError (the run is deleted in MLflow) a later call continues at `position`.
        """
        try:
            return self._drain()
        except DeletedError as error:
            self._write_uploaded(error.run_id, str(error))
            raise

    def _drain(self) -> int:
        self._batch = []  # what a call that was interrupted has left is after `position`
        end = self.scan()
        beside = self._system.is_new or self._evaluations.is_new or self._files_are_due
        if end == self.position and self._run and not beside:
            return 0
        meta = self._read_meta()
        if meta.parent_uid != self._meta.parent_uid:  # a sweep has adopted the run
            self._meta, self._run = meta, None
        run = self._open()
        begin = self.position
        for record in read_all(self._path, begin, end):
            if record.body["kind"] == "metrics":
                self._add_metrics(run, record)
            elif record.body["kind"] != "time":  # that one is for reports; a batch goes on
                self._flush(run, record.start)
                self._log_other(run, record)
                self.position = record.end
        self._flush(run, end)
        self.points += self._system.upload(run, end) + self._evaluations.upload(run, end)
        if tags := self._nodes.new_tags():
            run.log_tags(tags, end)
        self._tell_sweep(run)
        self._show_metric(run)
        self._write_uploaded(run.run_id)
        if self._files_are_due:
            note = partial(self._write_uploaded, run.run_id)
            self._files.publish(run, note, all_of_them=self.ended)
        return end - begin

    @property
    def left(self) -> str:
        """Say that the place of the artifacts has not taken all files; "" if it has."""
        waiting = self._files.positions
        return f"{files_left(waiting)} not in MLflow yet" if waiting else ""

    @property
    def _files_are_due(self) -> bool:
        return self._files.is_due or (self.ended and bool(self._files.positions))

    def fill_in(self) -> None:
        """Upload what MLflow lacks of the part of the journal before `position`."""
        run = self._open()
        present = run.points()
        missing: list[Point] = []
        tags: dict[str, str] = {}
        for record in read_all(self._path, 0, self.position):
            body = record.body
            if body["kind"] == "metrics":
                for point in self._points(record):
                    if stored(point) not in present:
                        present.add(stored(point))
                        missing.append(point)
            elif body["kind"] == "params":
                run.log_params(body["params"], self.position)
            else:
                if body["kind"] in KINDS:
                    publish(run, self.run_dir, body)
                tags |= self._tags(record)
        for source in (self._system, self._evaluations):
            missing += [p for p in source.all_points() if stored(p) not in present]
        for begin in range(0, len(missing), BATCH):
            run.log_points(missing[begin : begin + BATCH], self.position)
        self.points += len(missing)
        # A tag that somebody has changed in MLflow stays as it is.
        run.log_tags({k: v for k, v in tags.items() if k not in run.tags}, self.position)

    def close_killed(self) -> None:
        """Set the status KILLED, with the time of the last record as the end time."""
        run = self._open()
        log.info("KILLED: %s", UNRECORDED)
        run.set_ended("KILLED", self._last_time)
        tags = _described(run, {"status": "KILLED", "reason": UNRECORDED})
        run.log_tags({"hpctrain.reason": UNRECORDED, **tags}, self.position)
        self._status, self._why = "KILLED", UNRECORDED
        self._tell_sweep(run)

    def _tell_sweep(self, run: MlflowRun) -> None:
        meta = self._meta
        self._summary.update(run, meta.uid, meta.run_name, self._status, self._why)

    def _show_metric(self, run: MlflowRun) -> None:
        if not self._shown and (metric := Row.of(self.run_dir, "", "", "", "").metric):
            self._shown = metric
            self._has_view = tolerant("the view of the experiment", lambda: run.show(metric))

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
                self._run = MlflowRun(self._meta, start, self._pause)
            self.position = self._run.position
            self._system.begin(self._run.tags)
            note = Uploaded.read(self.run_dir)
            known = note is not None and (note.uri, note.run_id) == (
                self._meta.uri,
                self._run.run_id,
            )
            self._evaluations.begin(note.evaluations if note is not None and known else ())
            self._files.begin(note.waiting if note is not None and known else ())
            self._has_view = note.has_view if note is not None and known else False
            log.info("run %s, from byte %d", self._run.run_id, self.position)
        return self._run

    def _sweep_lock(self) -> AbstractContextManager[int | None]:
        """Return the lock under which one run of a sweep creates the parent of all of them.

        The runs of a sweep are in one folder, and so is the lock.
        """
        if self._meta.parent_uid is None:
            return nullcontext()
        path = self.run_dir.absolute().parent / f".{self._meta.parent_uid}.lock"
        return file_lock(path, lambda: self._pause(0.2))

    def _learn_status(self, record: Record) -> None:
        body = record.body
        self._status, self._why = str(body["status"]), str(body.get("reason", ""))
        self.ended = self._status != "RUNNING"
        if not self.ended:
            self.writer = Process(body["host"], body["pid"], body["started"])

    def _learn_superseded(self, record: Record) -> None:
        begin, end = record.body["from"], record.body["to"]
        self._superseded.append((begin, end))
        steps = []
        for old in read_all(self._path, begin, end):
            if old.body["kind"] == "metrics":
                steps.append(old.body["step"])
                for key, value in old.body["metrics"].items():
                    self._first_time.setdefault((key, steps[-1], value), old.body["time"])
        if steps:
            attempt = record.body["attempt"]
            self._superseded_steps.append(f"{min(steps)}-{max(steps)} (by attempt {attempt})")

    def _add_metrics(self, run: MlflowRun, record: Record) -> None:
        points = self._points(record)
        if len(self._batch) + len(points) >= BATCH:
            self._flush(run, record.start)
        self._batch += points

    def _points(self, record: Record) -> list[Point]:
        """Return the points of a record of metrics; none if it is superseded."""
        if any(begin <= record.start < end for begin, end in self._superseded):
            return []
        step, now = record.body["step"], record.body["time"]
        first = self._first_time
        return [
            Point(key, decode(value), first.get((key, step, value), now) if first else now, step)
            for key, value in record.body["metrics"].items()
        ]

    def _log_other(self, run: MlflowRun, record: Record) -> None:
        body = record.body
        match body["kind"]:
            case "params":
                run.log_params(body["params"], record.end)
            case "tags" | "superseded" | "note":
                tags = self._tags(record)
                if run.tags.get(_NOTE):  # people may have changed it
                    tags.pop(_NOTE, None)
                run.log_tags(tags, record.end)
            case "artifact" | "dataset" | "model":
                self._let_wait(run, record)
                run.log_tags({}, record.end)
            case "status":
                status = body["status"]
                self._let_wait(run, record)
                if status == "RUNNING":
                    run.set_running()
                else:
                    run.set_ended(status, body["time"])
                run.log_tags({**self._tags(record), **_described(run, body)}, record.end)
            case kind:
                # A newer version of hpctrain has written it; this version cannot know it.
                log.warning("no use for a %r record at byte %d", kind, record.start)

    def _let_wait(self, run: MlflowRun, record: Record) -> None:
        """Let the files of a record wait; that is noted before the position goes on."""
        self._files.add(record.start)
        self._write_uploaded(run.run_id)

    def _tags(self, record: Record) -> dict[str, str]:
        """Return the tags for a record."""
        body = record.body
        match body["kind"]:
            case "tags":
                return dict(body["tags"])
            case "note":
                return {f"hpctrain.note.{body['topic']}": str(body["text"])}
            case "superseded":
                return {"hpctrain.superseded": "steps " + ", ".join(self._superseded_steps)}
            case "status":
                attempt, reason = str(body["attempt"]), body.get("reason", "")
                return {"hpctrain.job.attempt": attempt, "hpctrain.reason": reason}
        return {}

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
        evaluated = sorted(self._evaluations.uploaded)
        note = Uploaded(
            *(uri, uid, experiment_id, run_id, self.position, parent, problem),
            samples=self._system.positions,
            evaluations=evaluated,
            waiting=self._files.positions,
            has_view=self._has_view,
        )
        note.write(self.run_dir)
        self._next_note = time.monotonic() + 1.0


def _described(run: MlflowRun, body: Mapping[str, Any]) -> dict[str, str]:
    """Return the description with the cause of the end, if that changes it."""
    before = str(run.read_tags().get(_NOTE, ""))
    after = with_cause(before, body["status"], str(body.get("reason", "")))
    return {_NOTE: after} if after != before else {}


def check_known(meta: Meta, run_dir: Path) -> None:
    """Check that the store of a run is one that this user has chosen.

    Requests to a server carry the user's credentials for MLflow, so they must not go to a server
    that only a file of somebody else names. Nor is a database of that name written.

    If it is not, the TrackingError says how to choose it.
    """
    if meta.is_ours or os.environ.get("MLFLOW_TRACKING_URI", "").rstrip("/") == meta.uri.rstrip(
        "/"
    ):
        return
    try:
        owner = pwd.getpwuid(meta.owner or 0).pw_name
    except KeyError:
        owner = f"user {meta.owner}"
    uri = mask(meta.uri)
    raise TrackingError(
        f"this run belongs to {owner}, and its journal/meta.json names the store {uri}: nothing "
        "was sent there, since your credentials for MLflow would go with it. If you know that "
        f"store, say so: `python -m hpctrain sync --uri {shlex.quote(uri)} "
        f"{shlex.quote(str(run_dir))}`, or set MLFLOW_TRACKING_URI to it"
    )


def upload_lock(run_dir: Path, wait: Callable[[], None]) -> AbstractContextManager[int | None]:
    """Return the lock that lets only one uploader at a time work on a run."""
    return file_lock(journal_path(run_dir).with_name("upload.lock"), wait, parts=2)
