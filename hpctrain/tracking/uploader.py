"""The uploader: a process of its own that carries a journal into MLflow, exactly once.

    python -m hpctrain.tracking.uploader RUN_DIR

It follows the journal until the final status is up, or until the process that writes it is gone:
then it records the run as KILLED. A later attempt continues the same MLflow run. Killing it loses
nothing, and neither does a store that is away: it tries again, the training never notices.

A metric that a resumed attempt logs again, with the value it had before, takes the time of its
first logging, so that the store sees the point it already has.
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
    """The store was away for longer than one may wait."""


class Uploader:
    """Carries one journal.

    Args:
        run_dir: The run's directory.
        pause: Sleeps between two tries of a store that is away, or raises to give up.

    Attributes:
        offset: Up to here everything is in the store.
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
        self.offset = 0
        self.ended = False
        self.writer: Process | None = None
        self.points = 0
        self._scanned = 0
        self._last_time = 0.0
        self._overtaken: list[tuple[int, int]] = []
        self._first_time: dict[tuple[str, int, float | str], float] = {}
        self._superseded: list[str] = []
        self.scan()

    @property
    def writer_here(self) -> bool:
        """Whether the newest attempt runs, or ran, on this host; others have their own uploader."""
        return self.writer is not None and self.writer.here

    @property
    def writer_died(self) -> bool:
        """Whether the newest attempt has left, on this host, without a final status."""
        if self.ended or self.writer is None:
            return False
        return self.writer.here and not self.writer.alive

    def scan(self) -> int:
        """Learn what the new part of the journal says about the rest of it; return its end."""
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
        """Upload everything that the journal holds now; return the number of new bytes."""
        end = self.scan()
        if end == self.offset and self._run:
            return 0
        run = self._open()
        begin = self.offset
        for record in read_all(self._path, begin, end):
            if record.body["kind"] == "metrics":
                self._take_metrics(run, record)
            else:
                self._flush(run, record.start)
                self._take_other(run, record)
                self.offset = record.end
        self._flush(run, end)
        self._note(run)
        return end - begin

    def close_killed(self) -> None:
        """The writer has gone without a word: record that, at the time of its last one."""
        run = self._open()
        reason = "the training process ended without a final status"
        log.info("KILLED: %s", reason)
        run.set_ended("KILLED", self._last_time)
        run.log_tags({"hpctrain.reason": reason}, self.offset)

    def _open(self) -> MlflowRun:
        if self._run is None:
            records, _ = read(self._path, 0, limit=1)
            start = records[0].body["time"] if records else time.time()
            with self._sweep_lock():
                self._run = MlflowRun(self._meta, start, self._pause)
            self.offset = self._run.cursor
            log.info("run %s, from byte %d", self._run.run_id, self.offset)
        return self._run

    def _sweep_lock(self) -> AbstractContextManager[int | None]:
        """The runs of a sweep, side by side in one folder, share a parent: one of them makes it."""
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
        self._overtaken.append((begin, end))
        steps = []
        for old in read_all(self._path, begin, end):
            if old.body["kind"] == "metrics":
                steps.append(old.body["step"])
                for key, value in old.body["metrics"].items():
                    self._first_time.setdefault((key, steps[-1], value), old.body["time"])
        if steps:
            attempt = record.body["attempt"]
            self._superseded.append(f"{min(steps)}-{max(steps)} (by attempt {attempt})")

    def _take_metrics(self, run: MlflowRun, record: Record) -> None:
        if any(begin <= record.start < end for begin, end in self._overtaken):
            return
        body = record.body
        step, now = body["step"], body["time"]
        if len(self._batch) + len(body["metrics"]) >= BATCH:
            self._flush(run, record.start)
        for key, value in body["metrics"].items():
            first = self._first_time.get((key, step, value), now) if self._first_time else now
            self._batch.append(Point(key, decode(value), first, step))

    def _take_other(self, run: MlflowRun, record: Record) -> None:
        body, cursor = record.body, record.end
        match body["kind"]:
            case "params":
                run.log_params(body["params"], cursor)
            case "tags":
                run.log_tags(body["tags"], cursor)
            case "superseded":
                run.log_tags(
                    {"hpctrain.superseded": "steps " + ", ".join(self._superseded)}, cursor
                )
            case "status":
                status = body["status"]
                if status == "RUNNING":
                    run.set_running()
                else:
                    run.set_ended(status, body["time"])
                attempt = str(body["attempt"])
                tags = {"hpctrain.job.attempt": attempt, "hpctrain.reason": body.get("reason", "")}
                run.log_tags(tags, cursor)
            case kind:
                # A journal of a newer version; its own uploader will know.
                log.warning("no use for a %r record at byte %d", kind, record.start)

    def _flush(self, run: MlflowRun, cursor: int) -> None:
        if self._batch:
            run.log_points(self._batch, cursor)
            self.points += len(self._batch)
            self._batch = []
        self.offset = cursor

    def _note(self, run: MlflowRun) -> None:
        meta = self._meta
        Uploaded(meta.uri, meta.uid, run.experiment_id, run.run_id, self.offset).write(self.run_dir)


def upload_lock(run_dir: Path, wait: Callable[[], None]) -> AbstractContextManager[int | None]:
    """Only one uploader per run."""
    return file_lock(journal_path(run_dir).with_name("upload.lock"), wait)


class Follower:
    """Follows a journal to its end.

    Args:
        run_dir: The run's directory.
        poll: Seconds between two looks at the journal.
        drain: Seconds that it may stay after the training has ended.
    """

    def __init__(self, run_dir: Path, poll: float, drain: float) -> None:
        self._run_dir = run_dir
        self._poll = poll
        self._drain = drain
        self._deadline: float | None = None
        self._stdin = True
        self._uploader = Uploader(run_dir, self._pause)

    def run(self) -> None:
        """Return when there is no more to come."""
        with upload_lock(self._run_dir, lambda: self._pause(0.2)):
            while True:
                # Asked before the drain, which then sees the last thing that the dead have written.
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
        if self._deadline is None and (not self._stdin or self._uploader.writer_died):
            self._deadline = time.monotonic() + self._drain
        if self._deadline is not None and time.monotonic() + seconds > self._deadline:
            raise GaveUp
        self._nap(seconds)

    def _nap(self, seconds: float) -> None:
        """Sleep, but wake when the training closes our stdin: it finishes, or it has died."""
        if not self._stdin:
            time.sleep(min(seconds, 0.2))
        elif select.select([sys.stdin], [], [], seconds)[0]:
            self._stdin = bool(os.read(sys.stdin.fileno(), 1))


def main(argv: list[str]) -> int:
    """Run the process; 0 when everything is in the store."""
    parser = argparse.ArgumentParser(prog="python -m hpctrain.tracking.uploader")
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--poll", type=float, default=2.0, metavar="SECONDS")
    parser.add_argument("--drain", type=float, default=60.0, metavar="SECONDS")
    options = parser.parse_args(argv)
    for number in BROADCAST_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    # The tracker started us with them blocked, lest one arrive before the line above.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, BROADCAST_SIGNALS)
    os.nice(5)  # we share the training's cores
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
