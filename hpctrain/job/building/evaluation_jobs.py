"""`evaluation.job=true`: each checkpoint is evaluated by a Slurm job of its own.

    save ── asked.json ── a thread of rank 0 ── sbatch ── evaluate RUN --step N --record
                               ↑                               └── evaluations/recorded/step-N.json
                               └── at each save: jobs that ended without a result, again

The training never waits for a job. A checkpoint is kept until its result is there. What an attempt
could not submit, because it was killed, the next one does.
"""

import dataclasses
import logging
import threading
import time
from collections.abc import Collection

from hpctrain.checkpoint.files.manifest import checkpoints, is_healthy
from hpctrain.checkpoint.saving.committed import Readers
from hpctrain.config.evaluation_job import job_config
from hpctrain.config.schema import Config
from hpctrain.errors import HpctrainError
from hpctrain.metric_names import lower_is_better
from hpctrain.run_record import Followed
from hpctrain.runs.chosen_checkpoint import best_step
from hpctrain.runs.code.snapshot import Snapshot
from hpctrain.runs.evaluation_requests import EvaluationRequest, asked, without_result
from hpctrain.runs.run_dir import RunDir
from hpctrain.slurm import sbatch
from hpctrain.slurm.queue import me, queued
from hpctrain.slurm.script import sbatch_script
from hpctrain.step_names import step_name, step_of
from hpctrain.tracking import recorded

log = logging.getLogger(__name__)
_TRIES = 3
_LONGEST_END_S = 120.0  # for the last submissions of a run that has finished
_LOOK_S = 2.0  # between two looks at a job that is ending


class EvaluationJobs(Readers):
    """Asks for the evaluations of a run; only rank 0 has one."""

    def __init__(self, config: Config, run: RunDir) -> None:
        self._run, self._most = run, config.evaluation.most_waiting
        self._config = job_config(config)
        self._config.name = f"eval-{config.name}"[:64]
        self._follow(config.checkpoint.best, config.checkpoint.best_mode)
        self._wake, self._finishing = threading.Event(), False
        self._told = ""
        self._thread = threading.Thread(target=self._work, name="evaluation-jobs", daemon=True)
        self._thread.start()
        self.saved()  # what the attempt before has left

    def saved(self) -> None:
        """Ask for the evaluation of the checkpoints that have none; the thread submits the jobs."""
        self._ask()
        self._warn_of_missing_metric()
        self._wake.set()

    def needed(self) -> Collection[int]:
        """Return the steps of the checkpoints that wait for their evaluation, and of the best."""
        waiting = self._waiting()  # first: a result that comes meanwhile is in one of the two
        best = best_step(self._run.path, self._run.read())
        return waiting | ({best} if best else set())

    def _waiting(self) -> set[int]:
        return {one.step for one in without_result(self._run.path) if not one.given_up}

    def _follow(self, metric: str | None, mode: str | None) -> None:
        """Note in run.json by which metric of the evaluations a checkpoint is the best."""
        if metric is None or not metric.startswith("val/"):
            return
        lower = lower_is_better(metric, mode)
        if self._run.read().best_by_jobs != Followed(metric=metric, lower=lower):
            self._run.update(best_by_jobs={"metric": metric, "lower": lower})

    def _warn_of_missing_metric(self) -> None:
        """Say that no result has the metric of `checkpoint.best`, which tasks of users may name."""
        followed, results = self._run.read().best_by_jobs, recorded.read_all(self._run.path)
        if not followed or not results or any(followed.metric in r.metrics for r in results):
            return
        log.error(
            "checkpoint.best=%s: the evaluations have no such metric, so no checkpoint is the "
            "best; they have %s",
            *(followed.metric, ", ".join(results[-1].metrics)),
        )

    def finish(self) -> None:
        """Ask for the last checkpoint, whatever waits, and wait until its job is submitted."""
        self._ask(last=True)
        self._finishing = True
        self._wake.set()
        self._thread.join(_LONGEST_END_S)
        if self._thread.is_alive():
            log.warning("Slurm does not answer; %s", self._cure())
        elif waiting := self._waiting():
            steps = ", ".join(map(str, sorted(waiting)))
            log.info("the evaluations of step %s go on in jobs of their own", steps)

    def _ask(self, *, last: bool = False) -> None:
        """Note the checkpoints to evaluate, the oldest first, as far as there is room."""
        every = asked(self._run.path)
        done = recorded.steps(self._run.path) | {one.step for one in every}
        room = self._most - len(self._waiting())
        paths = checkpoints(self._run.checkpoints)
        for path in reversed(paths):
            step = step_of(path)
            if step in done or not is_healthy(path):
                continue
            if room > 0 or (last and path == paths[0]):
                EvaluationRequest.of(self._run.path, step).write()
                room -= 1
            elif path == paths[0]:
                log.warning(
                    "step %d is not evaluated yet: %d checkpoints wait for their evaluations "
                    "(evaluation.most_waiting)",
                    *(step, self._most),
                )

    def _work(self) -> None:
        while True:
            self._wake.wait()
            self._wake.clear()
            finishing, ending = self._finishing, False
            try:
                ending = self._submit_missing()
                self._told = ""
            except (HpctrainError, OSError) as error:
                if str(error) != self._told:
                    self._told = str(error)
                    log.warning("an evaluation is not submitted: %s; %s", error, self._cure())
            if finishing and not ending:
                return
            if finishing:
                time.sleep(_LOOK_S)
                self._wake.set()

    def _submit_missing(self) -> bool:
        """Submit a job for each evaluation that has neither a result nor a job in the queue."""
        for one in asked(self._run.path):
            if recorded.read(self._run.path, one.step) is not None:
                one.remove()
        waiting = [one for one in without_result(self._run.path) if not one.given_up]
        queue = queued([me()]) if any(one.tries for one in waiting) else {}
        ending = False
        for one in waiting:
            if (job := queue.get((str(one.script), 0))) is not None:
                ending |= job.is_ending
                continue
            # It may have left the queue after the results were read, because it is done.
            if recorded.read(self._run.path, one.step) is not None:
                continue
            if one.tries == _TRIES or not (self._run.checkpoints / step_name(one.step)).is_dir():
                dataclasses.replace(one, given_up=True).write()
                log.error(
                    "step %d has no evaluation after %d jobs, see %s; %s",
                    *(one.step, one.tries, one.folder, self._cure(one.step)),
                )
                continue
            self._submit(one)
        return ending

    def _submit(self, one: EvaluationRequest) -> None:
        one = dataclasses.replace(one, tries=one.tries + 1, job_id=None).write()
        code = self._run.read().code
        kept = Snapshot.load(self._run.path.parent / "code" / code) if code else None
        text = sbatch_script(
            self._config,
            one.folder,
            1,
            pythonpath=kept.pythonpath if kept else (),
            command=f"evaluate --record --step {one.step}",
        )
        (one.folder / "batch").mkdir(exist_ok=True)
        (one.folder / "tasks").write_text(f"{self._run.path}\n")
        one.script.write_text(text)
        job_id = sbatch.sbatch(one.script, self._config)
        dataclasses.replace(one, job_id=job_id).write()
        log.info("job %s evaluates the checkpoint of step %d", job_id, one.step)

    def _cure(self, step: int | None = None) -> str:
        which = "N" if step is None else step
        return f"`python -m hpctrain evaluate {self._run.path} --record --step {which}` makes it up"
