"""What a journal says of its records: which states there were, and which metrics are superseded.

It is learned in the order of the journal, and ahead of the upload: a record that supersedes metrics
stands behind them.
"""

from pathlib import Path
from typing import Any

from hpctrain.base.processes.child import Process
from hpctrain.tracking.journal import JournalRecord, journal_path, read, read_all
from hpctrain.tracking.uploading.mlrun import Point


class JournalFacts:
    """What is known of the journal up to the last `scan`.

    Attributes:
        ended: Whether the newest attempt has recorded its final status.
        writer: The process of the newest attempt.
        last_time: The time of the last record.
    """

    def __init__(self, run_dir: Path) -> None:
        self._path = journal_path(run_dir)
        self.ended = False
        self.writer: Process | None = None
        self.last_time = 0.0
        self._scanned = 0  # the position up to which `scan` has read
        self._superseded: list[tuple[int, int]] = []  # positions from, to
        self._first_time: dict[tuple[str, int, float | str], float] = {}  # by key, step, value
        self.scan()

    @property
    def writer_here(self) -> bool:
        """Whether the newest attempt is of this host; on another it has its own uploader."""
        return self.writer is not None and self.writer.here

    @property
    def writer_died(self) -> bool:
        """Whether the newest attempt has died on this host without a final status."""
        return not self.ended and self.writer is not None and self.writer.died_here

    def scan(self) -> int:
        """Learn from the new part of the journal; return its end."""
        while True:
            records, end = read(self._path, self._scanned)
            for record in records:
                self.last_time = max(self.last_time, record.body["time"])
                if record.body["kind"] == "status":
                    self.ended = record.body["status"] != "RUNNING"
                    if not self.ended:
                        body = record.body
                        self.writer = Process(body["host"], body["pid"], body["started"])
                elif record.body["kind"] == "superseded":
                    self._learn_superseded(record.body)
            if end == self._scanned:
                return end
            self._scanned = end

    def points(self, record: JournalRecord) -> list[Point]:
        """Return the points of a record of metrics; none if it is superseded.

        A value that was logged before at its step has the time of then, so that MLflow recognizes
        the point.
        """
        if any(begin <= record.start < end for begin, end in self._superseded):
            return []
        step, now = record.body["step"], record.body["time"]
        first = self._first_time
        return [
            Point(key, float(value), first.get((key, step, value), now) if first else now, step)
            for key, value in record.body["metrics"].items()
        ]

    def tags(self, record: JournalRecord) -> dict[str, str]:
        """Return the tags for a record."""
        body = record.body
        match body["kind"]:
            case "tags":
                return dict(body["tags"])
            case "note":
                return {f"hpctrain.note.{body['topic']}": str(body["text"])}
            case "status":
                attempt, reason = str(body["attempt"]), body.get("reason", "")
                return {"hpctrain.attempt": attempt, "hpctrain.reason": reason}
        return {}

    def _learn_superseded(self, body: dict[str, Any]) -> None:
        begin, end = body["from"], body["to"]
        self._superseded.append((begin, end))
        for old in read_all(self._path, begin, end):
            if old.body["kind"] == "metrics":
                for key, value in old.body["metrics"].items():
                    point = key, old.body["step"], value
                    self._first_time.setdefault(point, old.body["time"])
