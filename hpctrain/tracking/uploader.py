"""The uploader: a separate process that uploads a journal to MLflow, each value exactly once.

    python -m hpctrain.tracking.uploader RUN_DIR

It follows the journal until the final status is uploaded, or until the process that writes the
journal has died; then it sets the status KILLED. A later attempt continues the same MLflow run.
Nothing is lost when the uploader is killed or the store is down: a restarted uploader continues at
the position in the store, and failed requests are tried again.

A resumed attempt often logs a metric again with the same value. The uploader then sends the time of
the first logging, so that MLflow recognizes the point and does not store it twice.
"""

import argparse
import logging
import os
import select
import signal
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from hpctrain.errors import TrackingError
from hpctrain.lock import file_lock
from hpctrain.secrets import mask_logging
from hpctrain.tracking.journal import Record, decode, journal_path, read, read_all
from hpctrain.tracking.meta import Meta, Uploaded
from hpctrain.tracking.mlrun import BATCH, MlflowRun, Point
from hpctrain.tracking.process import BROADCAST_SIGNALS, Process

log = logging.getLogger(__name__)


class GaveUp(Exception):
    """The store did not answer for longer than the uploader may wait."""


class Uploader:
    """Uploads one journal.

    Args:
        run_dir: The run directory.
        pause: Called between two tries with a number of seconds. It sleeps, or raises to give up.

    Attributes:
        position: The position up to which everything is in the store.
        ended: Whether the newest attempt has written its final status.
        writer: The process of the newest attempt.
        points: The number of metric values uploaded by this object.
    """

    def __init__(self, run_dir: Path, pause: Callable[[float], None]) -> None:
        self.run_dir = run_dir
        self._path = journal_path(run_dir)
        self._pause = pause
        self._meta = Meta.read(run_dir)
        self._run: MlflowRun | None = None
        self._batch: list[Point] = []
        self.position = 0
        self.ended = False
        self.writer: Process | None = None
        self.points = 0
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
        return self.writer.here and not self.writer.alive

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
        """Upload everything that is in the journal now; return the number of new bytes."""
        end = self.scan()
        if end == self.position and self._run:
            return 0
        run = self._open()
        begin = self.position
        for record in read_all(self._path, begin, end):
            if record.body["kind"] == "metrics":
                self._add_metrics(run, record)
            else:
                self._flush(run, record.start)
                self._log_other(run, record)
                self.position = record.end
        self._flush(run, end)
        self._write_uploaded(run)
        return end - begin

    def close_killed(self) -> None:
        """Set the status KILLED, with the time of the last record as the end time."""
        run = self._open()
        reason = "the training process ended without a final status"
        log.info("KILLED: %s", reason)
        run.set_ended("KILLED", self._last_time)
        run.log_tags({"hpctrain.reason": reason}, self.position)

    def _open(self) -> MlflowRun:
        if self._run is None:
            records, _ = read(self._path, 0, limit=1)
            start = records[0].body["time"] if records else time.time()
            with self._sweep_lock():
                self._run = MlflowRun(self._meta, start, self._pause)
            self.position = self._run.position
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
        self.ended = body["status"] != "RUNNING"
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
        if any(begin <= record.start < end for begin, end in self._superseded):
            return
        body = record.body
        step, now = body["step"], body["time"]
        if len(self._batch) + len(body["metrics"]) >= BATCH:
            self._flush(run, record.start)
        for key, value in body["metrics"].items():
            first = self._first_time.get((key, step, value), now) if self._first_time else now
            self._batch.append(Point(key, decode(value), first, step))

    def _log_other(self, run: MlflowRun, record: Record) -> None:
        body = record.body
        match body["kind"]:
            case "params":
                run.log_params(body["params"], record.end)
            case "tags":
                run.log_tags(body["tags"], record.end)
            case "superseded":
                steps = "steps " + ", ".join(self._superseded_steps)
                run.log_tags({"hpctrain.superseded": steps}, record.end)
            case "status":
                status = body["status"]
                if status == "RUNNING":
                    run.set_running()
                else:
                    run.set_ended(status, body["time"])
                attempt = str(body["attempt"])
                tags = {"hpctrain.job.attempt": attempt, "hpctrain.reason": body.get("reason", "")}
                run.log_tags(tags, record.end)
            case kind:
                # A newer version of hpctrain has written it; this version cannot know it.
                log.warning("no use for a %r record at byte %d", kind, record.start)

    def _flush(self, run: MlflowRun, position: int) -> None:
        """Upload the waiting metrics, which are all before `position`."""
        if self._batch:
            run.log_points(self._batch, position)
            self.points += len(self._batch)
            self._batch = []
        self.position = position

    def _write_uploaded(self, run: MlflowRun) -> None:
        uri, uid = self._meta.uri, self._meta.uid
        Uploaded(uri, uid, run.experiment_id, run.run_id, self.position).write(self.run_dir)


def upload_lock(run_dir: Path, wait: Callable[[], None]) -> AbstractContextManager[int | None]:
    """Return the lock that lets only one uploader at a time work on a run."""
    return file_lock(journal_path(run_dir).with_name("upload.lock"), wait)


class Follower:
    """Follows a journal until there is nothing more to upload.

    Args:
        run_dir: The run directory.
        poll: Seconds between two looks at the journal.
        drain: Seconds that it may go on after the training process has ended.
    """

    def __init__(self, run_dir: Path, poll: float, drain: float) -> None:
        self._run_dir = run_dir
        self._poll = poll
        self._drain = drain
        self._deadline: float | None = None
        self._stdin_open = True
        self._uploader = Uploader(run_dir, self._pause)

    def run(self) -> None:
        """Return when everything is uploaded and the training process has ended."""
        with upload_lock(self._run_dir, lambda: self._pause(0.2)):
            while True:
                # Checked before `drain`: if it has died, `drain` uploads its last record.
                died = self._uploader.writer_died
                self._uploader.drain()
                if self._uploader.ended or not self._uploader.writer_here:
                    return
                if died and self._uploader.writer_died:
                    self._uploader.close_killed()
                    return
                if not died:
                    self._nap(self._poll)

    def _pause(self, seconds: float) -> None:
        if self._deadline is None and (not self._stdin_open or self._uploader.writer_died):
            self._deadline = time.monotonic() + self._drain
        if self._deadline is not None and time.monotonic() + seconds > self._deadline:
            raise GaveUp
        self._nap(seconds)

    def _nap(self, seconds: float) -> None:
        """Sleep, but wake up when the training closes our stdin: it finishes or has died."""
        if not self._stdin_open:
            time.sleep(min(seconds, 0.2))
        elif select.select([sys.stdin], [], [], seconds)[0]:
            self._stdin_open = bool(os.read(sys.stdin.fileno(), 1))


def main(argv: list[str]) -> int:
    """Run the uploader; return 0 when everything is in the store."""
    parser = argparse.ArgumentParser(prog="python -m hpctrain.tracking.uploader")
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--poll", type=float, default=2.0, metavar="SECONDS")
    parser.add_argument("--drain", type=float, default=60.0, metavar="SECONDS")
    options = parser.parse_args(argv)
    for number in BROADCAST_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    # The tracker has blocked them, so that none could arrive before the lines above.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, BROADCAST_SIGNALS)
    os.nice(5)  # the uploader shares the cores of the training
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    mask_logging()
    log.info("uploader %d of %s", os.getpid(), options.run_dir)
    try:
        Follower(options.run_dir, options.poll, options.drain).run()
    except GaveUp:
        log.error("gave up; `python -m hpctrain sync %s` uploads the rest", options.run_dir)
        return 1
    except TrackingError as error:
        log.error("%s", error)
        return error.exit_code
    except Exception:
        log.exception("the uploader failed")
        return 1
    log.info("done")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
