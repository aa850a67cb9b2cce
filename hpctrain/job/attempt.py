"""One attempt at a run: rank 0 records in the run directory that it began and how it ended.

Rank 0 has an `Attempt`, which holds the lock of the run directory, writes run.json and tracks the
metrics. The other ranks have a `NoAttempt`.
"""

from __future__ import annotations

import logging
import math
import os
import socket
import sys
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self

from hpctrain import __version__
from hpctrain.config.schema import Config
from hpctrain.distributed import devices
from hpctrain.distributed.ranks import RankInfo
from hpctrain.job.requeue import may_requeue, requeue_from_rank
from hpctrain.runs import lost_checkpoints, stop_request
from hpctrain.runs.code import provenance
from hpctrain.runs.failure import described
from hpctrain.runs.run_dir import RunDir
from hpctrain.runs.swept import label
from hpctrain.tracking.tracker import JournalTracker, NullTracker, Tracker
from hpctrain.training.trainer import Outcome

log = logging.getLogger(__name__)


class NoAttempt:
    """The attempt of the ranks other than 0, which write nothing."""

    tracker: Tracker = NullTracker()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        pass

    def finished(self, outcome: Outcome) -> None:
        """Record that all steps were made."""

    def interrupted(self, outcome: Outcome, reason: str) -> None:
        """Record that the run has saved and stops, because of the signal `reason`."""


class Attempt(NoAttempt):
    """The attempt of rank 0: a context manager that records an exception as a failure.

    Raises:
        StorageError: On entry, when another process holds the run.
    """

    def __init__(self, config: Config, run: RunDir, ranks: RankInfo) -> None:
        self._config, self._run, self._ranks = config, run, ranks

    def __enter__(self) -> Self:
        ranks = self._ranks
        with ExitStack() as stack:
            stack.enter_context(self._run.lock())
            self._drop_old_stop_request()
            self._run.begin_attempt(
                host=socket.gethostname(),
                pid=os.getpid(),
                launcher=ranks.launcher,
                world_size=ranks.world_size,
                nodes=ranks.num_nodes,
                hosts=list(ranks.hosts),
                job_id=ranks.job_id,
                restart_count=ranks.restart_count,
                first_step=self._run.last_checkpoint(),
                code=str(Path(__file__).parents[2]),
            )
            stack.push(self._failed)  # called for every exception from here on
            lost_checkpoints.refuse(self._config, self._run)
            # Before the tracker starts: its end would wait for MLflow.
            devices.kind(self._config.parallel.device, self._config.launch.gpus_per_node)
            if recorded := self._run.read().get("provenance"):
                provenance.take_over(self._run.provenance, Path(recorded))
                self._run.update(provenance=None)
            self.tracker = self._build_tracker()
            self.tracker.start(asdict(self._config), self._tags())
            self._say_what_changed()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *raised: Any) -> None:
        self._stack.__exit__(*raised)

    def _failed(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            reason = described(error)
            self._run.end_attempt("failed", error=reason)
            self.tracker.finish("FAILED", reason=reason)

    def finished(self, outcome: Outcome) -> None:
        """Record that the run is over: why it ended early, and which results are not finite."""
        result = {"step": outcome.step} | outcome.metrics
        wrong = [
            f"{name} is {value}"
            for name, value in outcome.metrics.items()
            if not math.isfinite(value) and (name == self._config.metric or name.startswith("val/"))
        ]
        not_finite = f"not finite: {', '.join(wrong)}" if wrong else ""
        reason = "; ".join(filter(None, (outcome.reason, not_finite)))
        self._run.end_attempt("finished", result=result, **({"reason": reason} if reason else {}))
        if outcome.reason:
            log.info("step %d: %s", outcome.step, outcome.reason)
        self.tracker.finish("FINISHED", reason=outcome.reason)

    def interrupted(self, outcome: Outcome, reason: str) -> None:
        """Record the stop; under Slurm, requeue the job unless the user stopped it."""
        self._run.end_attempt("interrupted", reason=reason, step=outcome.step)
        # Read after that write: NFS caches the content of a folder until the client writes there.
        request = stop_request.read(self._run.path)
        log.info("stopped by %s at step %d, saved: it resumes there", reason, outcome.step)
        # The requeue comes first: the grace time may end before the rest is done.
        if request is not None:
            log.info("cancelled by %s: not requeued", request["by"])
        elif self._ranks.launcher == "slurm" and reason != "SIGINT":
            if may_requeue(self._ranks.restart_count, outcome.first_step, outcome.step):
                requeue_from_rank(self._ranks.job_id)
            else:
                log.error("no step since the last restart: not requeued")
        self.tracker.finish("KILLED", reason=f"stopped by {reason} at step {outcome.step}, saved")

    def _drop_old_stop_request(self) -> None:
        """Delete the stop request, except after a restart by Slurm: then it still holds."""
        restarted = self._ranks.launcher == "slurm" and self._ranks.restart_count > 0
        submitted = (self._run.read().get("submission") or {}).get("time", 0.0)
        if not restarted or stop_request.read(self._run.path, since=submitted) is None:
            stop_request.clear(self._run.path)

    def _build_tracker(self) -> Tracker:
        tracking = self._config.tracking
        if not tracking.enabled:
            return NullTracker()
        known = self._run.read()
        sweep = known.get("sweep", {})
        return JournalTracker(
            self._run.path,
            uri=str(tracking.uri),
            experiment=tracking.experiment,
            run_name=" ".join(filter(None, (self._run.name, label(known.get("swept", []))))),
            uid=known["uid"],
            parent_uid=sweep.get("uid"),
            parent_name=sweep.get("name"),
            upload=tracking.upload,
            drain=tracking.drain_s,
        )

    def _say_what_changed(self) -> None:
        """Warn if Python or its packages are others than at submission; only our code is a copy."""
        if changed := provenance.changes(self._run.provenance):
            log.warning(
                "Python or its packages have changed since this run was asked for: %s%s",
                ", ".join(changed[:6]),
                f" and {len(changed) - 6} more" if len(changed) > 6 else "",
            )

    def _tags(self) -> dict[str, str]:
        parent = self._run.read().get("parent") or {}
        return {f"hpctrain.parent_{key}": str(value) for key, value in parent.items()} | {
            # MLflow shows the commit only beside a source.
            "mlflow.source.name": provenance.source(self._run.provenance),
            "mlflow.source.type": "JOB" if self._ranks.job_id else "LOCAL",
            "mlflow.source.git.commit": provenance.commit(self._run.provenance),
            "hpctrain.version": __version__,
            "hpctrain.launcher": self._ranks.launcher,
            "hpctrain.job_id": self._ranks.job_id,
            "hpctrain.hosts": ",".join(self._ranks.hosts),
            "hpctrain.world_size": str(self._ranks.world_size),
            "hpctrain.command": " ".join(sys.argv),
        }
