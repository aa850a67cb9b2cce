"""One attempt at a run: rank 0 records in the run directory that it began and how it ended.

It holds the lock of the run directory, writes run.json and tracks the metrics.
"""

import logging
import math
import os
import socket
import sys
from collections.abc import Collection
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any, Self

from hpctrain.base import offered
from hpctrain.base.errors import (
    HpctrainError,
    MisfitError,
    NodeError,
    NoGpuError,
    PortTakenError,
    StorageError,
)
from hpctrain.base.processes.causes import (
    ANOTHER_RANK,
    NODE,
    PORT,
    PREEMPTED,
    USER_STOP,
    cause_of,
    named,
)
from hpctrain.cluster.ranks import epochs
from hpctrain.cluster.ranks.ranks import RankInfo
from hpctrain.cluster.slurm.requeue import requeue_from_rank
from hpctrain.config.metric_registry import RUNG
from hpctrain.config.sections import RunSections
from hpctrain.engine.building.instantiate import instantiate_all
from hpctrain.engine.distributed import devices
from hpctrain.engine.job import run_page
from hpctrain.engine.steps.stepping import Outcome
from hpctrain.runs.checkpoints.manifest import put_back
from hpctrain.runs.code import provenance, trained_code
from hpctrain.runs.run_dir import RunDir
from hpctrain.runs.start_again import refuse_lost_checkpoints
from hpctrain.runs.state import failure, stop_request
from hpctrain.runs.state.end import End, left_s, stopped
from hpctrain.runs.state.verdict import DECIDED_LATER, GOES_ON, Room, decide, go_on
from hpctrain.runs.sweep_overrides import titled
from hpctrain.tracking.meta import Meta
from hpctrain.tracking.tracker import JournalTracker, OtherTracker, Tracker

log = logging.getLogger(__name__)
_MODULES = frozenset(sys.modules)  # those before the first training of this process


class Attempt:
    """The attempt of rank 0: a context manager that records an exception as a failure.

    To enter it while another process holds the run is a StorageError.
    """

    tracker: Tracker = Tracker()  # until it has entered

    def __init__(self, config: RunSections, run: RunDir, ranks: RankInfo) -> None:
        self._config, self._run, self._ranks = config, run, ranks
        self._of_loop = config.of_loop

    def __enter__(self) -> Self:
        ranks = self._ranks
        with ExitStack() as stack:
            stack.enter_context(self._run.lock())
            is_new, first_step = self._run.is_new, 0
            if not is_new:
                put_back(self._run.checkpoints)
                first_step = self._run.last_checkpoint()
            self._drop_old_stop_request()
            facts = run_page.environment(self._config.job.site.container.image)
            self._code = code = trained_code.changes(self._run) if first_step else ""
            self._run.begin_attempt(
                environment=facts,
                host=socket.gethostname(),
                pid=os.getpid(),
                launcher=ranks.launcher,
                world_size=ranks.world_size,
                nodes=ranks.num_nodes,
                hosts=list(ranks.hosts),
                job_id=ranks.job_id,
                restart_count=ranks.restart_count,
                step_id=ranks.step_id,
                first_step=first_step,
                code=str(Path(__file__).parents[3]),
                **({"code_changed": code} if code else {}),
            )
            stack.push(self._failed)  # called for every exception from here on
            if not is_new:
                refuse_lost_checkpoints(self._run, self._of_loop.checkpoint)
            # Before the tracker starts: its end would wait for MLflow.
            devices.kind(self._of_loop.parallel.device, self._config.job.launch.gpus_per_node)
            if recorded := self._run.read().provenance:
                provenance.take_over(self._run.provenance, Path(recorded))
                self._run.update(provenance=None)
            self.tracker = self._build_tracker()
            tags = run_page.tags(self._run, ranks, facts)
            if code:
                tags["hpctrain.code_changed"] = code
            record = self._run.read()
            values = self._config.chosen([*record.overrides, *record.swept])
            self.tracker.start(values, tags)
            if self._config.tracking.enabled:
                # The builder of the data says what is wrong with it.
                with suppress(HpctrainError, OSError):
                    for data_set in run_page.data_sets(self._of_loop.data):
                        self.tracker.log_dataset(data_set)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *raised: Any) -> None:
        self._stack.__exit__(*raised)

    def _failed(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            self._record_failure(error)
        except (OSError, StorageError) as problem:
            # Nothing can be written there, which is often the error that has ended the attempt.
            if error is None:
                raise
            log.error("the end of this attempt is not recorded: %s", problem)

    def _record_failure(self, error: BaseException | None) -> None:
        epochs.end_if_over(self._run.path, self._ranks.attempt_key)
        if error is None:
            return
        self._decide(error)
        now = self._run.read().attempt
        if now.verdict in GOES_ON:  # decided here, or by the checks of the nodes
            self.tracker.finish("KILLED", reason=now.reason)
            return
        cause, reason = cause_of(error), now.error or failure.described(error)
        if cause is ANOTHER_RANK:  # the first rank that failed has told why
            reason = failure.cause(self._run.path, self._ranks.attempt_key) or reason
        if not now.verdict:
            facts: dict[str, Any] = {"misfit": True} if isinstance(error, MisfitError) else {}
            if isinstance(error, NodeError | NoGpuError | PortTakenError):
                facts["verdict"] = "failed"  # of which rank 0 knows more than what it has told
            self._run.end_attempt("failed", error=reason, cause=cause.name, **facts)
        # The batch script may start the ranks again then (`hpctrain.engine.job.verdict`).
        final = cause not in DECIDED_LATER or self._ranks.launcher != "slurm" or now.verdict != ""
        self.tracker.finish("FAILED", reason=named(cause.name, reason), final=final)

    def _decide(self, error: BaseException) -> None:
        """Decide at once on an error of the start, which only rank 0 knows."""
        if not isinstance(error, NoGpuError | PortTakenError):
            return
        job, hosts = self._config.job, list[str]()
        if isinstance(error, NoGpuError):
            hosts = offered.preflight.lost_gpu(job, self._run, self._ranks, error.hosts)
        # If MASTER_PORT names the port, a restart would find the same.
        if hosts or (isinstance(error, PortTakenError) and "MASTER_PORT" not in os.environ):
            cause = NODE if hosts else PORT
            end = End(cause, failure.described(error), hosts=tuple(hosts), bad=bool(hosts))
            go_on(self._run, self._ranks, end, job)

    def began_from(self, step: int, damaged: Collection[int]) -> None:
        """Record from which step it goes on, and what was damaged; say if the code has changed."""
        if damaged or self._run.read().attempt.first_step != step:
            self._run.add_facts(first_step=step, damaged=sorted(damaged))
        if self._code:
            log.warning(
                "the code has changed: %s. The run goes on from step %d with the code as it is "
                "now, and the checkpoint of that step is kept. If that is not meant, stop the run: "
                "%s; `resume --branch %s --step %d` goes on with the old code, once you put it "
                "back",
                *(self._code, step, trained_code.CHOICE, self._run.name, step),
            )
        trained_code.record(self._run, self._config.targets, _MODULES)

    def ended(self, outcome: Outcome, reason: str) -> None:
        """Record how the training has ended, without an error; `reason` is the stop request."""
        epochs.end_if_over(self._run.path, self._ranks.attempt_key)
        if outcome.finished:
            self._finished(outcome)
        elif outcome.paused:
            self._paused(outcome)
        else:
            self._interrupted(outcome.step, reason)

    def _finished(self, outcome: Outcome) -> None:
        """Record why the run ended early, and which results are not finite."""
        result = {"step": outcome.step} | outcome.metrics
        wrong = [
            f"{name} is {value}"
            for name, value in outcome.metrics.items()
            if not math.isfinite(value)
            and (name == self._of_loop.metric or name.startswith("val/"))
        ]
        not_finite = f"not finite: {', '.join(wrong)}" if wrong else ""
        reason = "; ".join(filter(None, (outcome.reason, not_finite)))
        facts = {"reason": reason} if reason else {}
        if self._ranks.launcher == "slurm":
            try:
                facts["waste"] = offered.right_size.unused(self._run.path)
            except Exception as error:  # advice never costs a finished run
                log.warning("what the job did not need is not known: %s", error)
        self._run.end_attempt("finished", result=result, **facts)
        if outcome.reason:
            log.info("step %d: %s", outcome.step, outcome.reason)
        self.tracker.finish("FINISHED", reason=reason)

    def _paused(self, outcome: Outcome) -> None:
        """Record the pause with its metrics. Nothing is requeued: somebody goes on later."""
        step = outcome.step
        self._run.end_attempt("paused", result={"step": step} | outcome.metrics, step=step)
        log.info("paused at step %d, as asked, and saved", step)
        rungs = {each.step for each in self._run.read().attempts if each.state == "paused"}
        self.tracker.log_metrics({RUNG: len(rungs)}, step)
        self.tracker.finish("SCHEDULED", reason=f"paused at step {step}")

    def _interrupted(self, step: int, reason: str) -> None:
        """Record the stop; under Slurm, requeue the job unless the user stopped it."""
        run, slurm = self._run, self._ranks.launcher == "slurm"
        run.update()  # NFS caches the content of a folder until the client writes there
        asked = map(stop_request.read, self._ranks.folders(run.path))
        request = next(filter(None, asked), None)
        cause = request.cause if request else USER_STOP
        end = End(cause, reason) if request or not slurm else stopped(reason, left_s())
        verdict = decide(run.read(), end, Room(), step)
        run.end_attempt(**verdict.record(step))
        log.info("stopped by %s at step %d, saved: it resumes there", reason, step)
        # The requeue comes first: the grace time may end before the rest is done.
        if request:
            log.info("cancelled by %s: not requeued", request.by)
        elif verdict.action == "failed":
            log.error("%s", verdict.reason)
        elif verdict.goes_on:
            requeued = requeue_from_rank(self._ranks.job_id)
            if not requeued and end.cause is PREEMPTED:  # or `scancel`, with the same signal
                run.end_attempt(**verdict.record(step) | {"cause": ""})
        by, failed = request.by if request else reason, verdict.action == "failed"
        said = verdict.reason if failed else f"stopped by {by} at step {step}, saved"
        self.tracker.finish("FAILED" if failed else "KILLED", reason=said)

    def _drop_old_stop_request(self) -> None:
        """Delete the stop request, except after a restart in a job of Slurm: then it holds."""
        ranks, record = self._ranks, self._run.read()
        again = ranks.restart_count > 0 or record.attempt.job_id == ranks.job_id
        # A run that shares its job may have been asked to stop while it began, and a trial between
        # the moment when its worker has taken it and this one.
        restarted = ranks.worker or (ranks.launcher == "slurm" and (again or record.shares_job))
        if not restarted or stop_request.read(self._run.path, since=record.submitted) is None:
            stop_request.StopRequest.drop(self._run.path)

    def _build_tracker(self) -> Tracker:
        tracking = self._config.tracking
        if not tracking.enabled:
            return Tracker()
        others: list[OtherTracker] = []
        if tracking.also:
            needed = "a class that inherits from hpctrain.trackers.OtherTracker"
            others = instantiate_all("tracking.also", tracking.also, OtherTracker, needed)
        known = self._run.read()
        sweep, name = known.sweep or {}, self._run.name
        if known.swept:
            name = titled(name, known.swept)
        names = tracking.experiment, name, known.uid, sweep.get("uid"), sweep.get("name")
        journal = JournalTracker(
            self._run.path,
            Meta(str(tracking.uri), *names),
            upload=tracking.upload,
            drain=tracking.drain_s,
            check=partial(epochs.end_if_over, self._run.path, self._ranks.attempt_key),
        )
        if not others:
            return journal
        return offered.SeveralTrackers(journal, others, self._run.path, name, known.uid)
