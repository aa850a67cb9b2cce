"""The summary of a sweep on its parent run in MLflow, kept up to date by the uploaders of its runs.

    own row ── set_tag (only this run's) ── read the rows of all ── write the tags
                                                  └── and again, if a row has changed meanwhile

No row can be lost when runs end at once, on one host or on many: each uploader reads the rows again
after it has written the tags, so the last one that writes has seen all of them.
"""

import time
from pathlib import Path

from hpctrain.tracking.meta import Meta
from hpctrain.tracking.page import sweep_table
from hpctrain.tracking.page.mlflow_names import clean_key
from hpctrain.tracking.page.sweep_table import Row
from hpctrain.tracking.uploading.journal_facts import JournalFacts
from hpctrain.tracking.uploading.mlrun import MlflowRun
from hpctrain.tracking.uploading.publish import tolerant

_EVERY_S = 30.0  # so often the values of a run in progress are renewed
_DIGEST = "mlflow.hpctrain.summary"


class SweepSummary:
    """What one run of a sweep tells its parent."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._sent: Row | None = None
        self._place = ""
        self._next = 0.0  # on the monotonic clock

    def update(self, run: MlflowRun, meta: Meta, journal: JournalFacts) -> None:
        """Renew the row of the run, if it has something new, and the tags of the parent."""
        if run.parent_id is None:
            return
        row = Row.of(self._run_dir, meta.run_name, run.run_id, journal.status)
        before = self._sent if self._place == run.parent_id else None
        early = time.monotonic() < self._next
        if before and (row == before or (row.status == before.status and early)):
            return
        if not run.call_parent("set_tag", sweep_table.PREFIX + meta.uid, row.text()):
            return
        count = self._write(run)
        self._sent, self._place = row, run.parent_id
        # A large sweep renews its tags about once a second, and not each run every 30 seconds.
        self._next = time.monotonic() + max(_EVERY_S, count)

    def _write(self, run: MlflowRun) -> int:
        """Write the tags until they tell of all runs; return their number."""
        asked = sweep_table.asked_of(self._run_dir)
        written = ""
        while True:
            parent = run.parent()
            if parent is None:  # it is deleted
                return 0
            tags: dict[str, str] = parent.data.tags
            rows = sweep_table.rows_in(tags)
            new = sweep_table.digest(rows)
            if new == written or (not written and tags.get(_DIGEST) == new):
                return len(rows)
            self._send(run, tags, rows, asked)
            run.call_parent("set_tag", _DIGEST, new)
            written = new

    def _send(self, run: MlflowRun, before: dict[str, str], rows: list[Row], asked: int) -> None:
        if best := sweep_table.best_of(rows):
            # In the table of the experiment a sweep is one row, with the value of its best run.
            value = "log_metric", clean_key(best.metric), best.value
            tolerant("the best value of the sweep", lambda: run.call_parent(*value, once=True))
        tags = sweep_table.tags(rows, asked)
        changed = [item for item in tags.items() if before.get(item[0]) != item[1]]
        run.set_parent_tags(dict(changed))
