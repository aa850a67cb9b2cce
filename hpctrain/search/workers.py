"""A worker of a search, as rank 0 of its job sees it: what to train next, and how it went.

    worker = Worker(folder)
    while piece := worker.next():
        …                          all ranks train piece.run up to the step piece.until
        worker.settle(piece)       run.json says how it went

Workers decide one after another, under the lock of the file `decision`; composing and training are
outside of it. The owner of a trial holds the lock of `trials/NUMBER`, which ends with its process:
a trial that is under way for Optuna and has no owner was left by a worker that was preempted or
killed, and the next worker goes on with it, wherever it was: before its config was frozen, in the
training, before its value was reported, or before Optuna was told.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from hpctrain.base.errors import HpctrainError, LaunchError
from hpctrain.base.files.lock import file_lock
from hpctrain.base.files.record import read
from hpctrain.base.processes.child import run_module
from hpctrain.base.secrets import mask
from hpctrain.launch.entry import Entry
from hpctrain.runs.run_dir import RunDir
from hpctrain.search import rule, space, trial_run, worker_arrays
from hpctrain.search.rule import Action, Choice
from hpctrain.search.trial_config import Bases
from hpctrain.search.trial_run import TrialPiece
from hpctrain.search.trials import GOAL, FoundSearch, owner_lock
from hpctrain.tracking import final_status
from hpctrain.tracking.meta import Uploaded

if TYPE_CHECKING:
    import optuna

log = logging.getLogger(__name__)
_PAUSES_S = 0.2, 5.0
"""Seconds between two looks at the study while others train: at first, and at most."""
_LONGEST_S = 600.0
_NAP_S, _LOOK_S, _UPLOAD_S = 0.05, 1.0, 120.0
_NOTHING_LEFT = "no trial is left to promote or to begin"
_LONGEST_REASON = 1000  # characters; a list of problems may be long


class _Stopped(Exception):
    """The worker was asked to stop while it waited."""


class Worker:
    """Gives the ranks of a job one piece after another; `folder` is that of the worker.

    It waits for other workers and for locks, until `stopped`. What it had begun then, another
    worker goes on with.
    """

    def __init__(self, folder: Path, stopped: Callable[[], bool] = lambda: False) -> None:
        self._folder = folder.absolute()
        self._sweep = self._folder.parents[1]
        self._note = worker_arrays.WorkerFile.of(folder)
        self._left = self._folder / worker_arrays.LEFT
        self._left.unlink(missing_ok=True)
        self._owned = ExitStack()  # the lock of the trial that this worker has
        self._stopped = stopped
        self._study = FoundSearch.of(self._sweep).open(self._wait)

    def next(self) -> TrialPiece | None:
        """Return what to train next, which this worker owns then; None if there is nothing more.

        It waits while other workers may give this one something to do. That is rare when no trial
        is left to begin, because who reports takes what this report promotes: so a worker that has
        waited for `_LONGEST_S` gives its node back.
        """
        with suppress(_Stopped):
            return self._next()
        self._owned.close()
        return None

    def settle(self, piece: TrialPiece, error: str = "") -> None:
        """Tell the study how a piece has gone, and give its trial back.

        If run.json has no result, the trial has failed with the error. Without an error it is as it
        was, and another worker, or this one, goes on with it.
        """
        with self._owned, suppress(_Stopped):
            try:
                if not self._told(piece) and error:
                    raise LaunchError(error)
            except (trial_run.Pruned, LaunchError) as end:
                self._tell(piece.number, end)

    def _next(self) -> TrialPiece | None:
        pause, since = _PAUSES_S[0], time.monotonic()
        while not self._stopped():
            with self._lock("decision"):
                found = self._found()
                choice = rule.choose(found)
                number = self._begin(found, choice)
            if choice.action is Action.END:
                self._end_in_mlflow()
                return None
            if choice.action is Action.WAIT:
                if time.monotonic() - since > _LONGEST_S:
                    log.info("this worker ends: others train what is left of the search")
                    self._left.touch()
                    return None
                self._wait(pause)
                pause = min(_PAUSES_S[1], pause * 1.5)
            if number is not None and (piece := self._prepare(found, number, choice.goal)):
                return piece
        return None

    def _wait(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while not self._stopped():
            if (left := until - time.monotonic()) <= 0:
                return
            time.sleep(min(left, _NAP_S))
        raise _Stopped

    def _lock(self, name: str | Path) -> AbstractContextManager[int]:
        return file_lock(self._sweep / name, lambda: self._wait(_NAP_S))

    def _found(self) -> FoundSearch:
        return FoundSearch.of(self._sweep, self._study)

    def _begin(self, found: FoundSearch, choice: Choice) -> int | None:
        """Do what was decided, under the lock; return the number of the trial to train."""
        if choice.action is Action.END:
            self._left.touch()
            self._end(found)
        number = choice.trial.number if choice.trial else None
        if choice.action is Action.ASK:
            number = space.ask(self._study, found)
        if number is None:
            return None
        self._trial(number).set_user_attr(GOAL, choice.goal)
        lock = owner_lock(self._sweep, number)
        lock.parent.mkdir(exist_ok=True)
        self._owned.enter_context(self._lock(lock))
        return number

    def _prepare(self, found: FoundSearch, number: int, goal: int) -> TrialPiece | None:
        """Return the piece; None if the trial needs no training, and has been told so."""
        stored = self._stored(number)
        until = None if goal == len(found.rungs) else found.rungs[goal - 1]
        began = stored.datetime_start.timestamp() if stored.datetime_start else 0.0
        entry = None
        try:
            if name := stored.user_attrs.get("run"):
                run = RunDir.open(Path(found.output_dir) / name)
            else:
                config, run = read(Bases, self._sweep / "bases.json").run(stored.params)
                entry = Entry([], config, run)
                if twin := next((each for each in found.trials if each.run == run.name), None):
                    raise trial_run.Pruned(f"the same run as trial {twin.number}")
            while run.is_locked():  # another command trains it
                self._wait(_LOOK_S)
            if entry:
                trial_run.freeze(self._sweep, found, entry, stored.params, self._wait)
                self._trial(number).set_user_attr("run", run.name)
            trial_run.take(run, self._note)
            piece = TrialPiece(run.path, until, number, began)
            if not self._told(piece):
                return piece
        except HpctrainError as error:
            self._tell(number, error)
        self._owned.close()
        return None

    def _told(self, piece: TrialPiece) -> bool:
        """Report the metric at the end of a piece, if its training has got there."""
        found = self._found()
        if (end := trial_run.outcome(piece, found)) is None:
            return False
        step, value, finished = end
        if step not in self._stored(piece.number).intermediate_values:  # its last owner has died
            self._trial(piece.number).report(value, step)
        if not math.isfinite(value):
            raise trial_run.Pruned(f"{found.metric} is {value} at step {step}")
        if finished:
            self._study.tell(piece.number, value, skip_if_finished=True)
        return True

    def _trial(self, number: int) -> optuna.trial.Trial:
        from optuna.trial import Trial

        return Trial(self._study, self._stored(number)._trial_id)

    def _stored(self, number: int) -> optuna.trial.FrozenTrial:
        return self._study.get_trials(deepcopy=False)[number]

    def _tell(self, number: int, end: HpctrainError) -> None:
        """End a trial for good: it is pruned, or has failed."""
        from optuna.trial import TrialState

        pruned, reason = isinstance(end, trial_run.Pruned), mask(str(end))
        log.warning("trial %d %s: %s", number, "is pruned" if pruned else "failed", reason)
        self._trial(number).set_user_attr("reason", reason[:_LONGEST_REASON])
        state = TrialState.PRUNED if pruned else TrialState.FAIL
        self._study.tell(number, state=state, skip_if_finished=True)

    def _end(self, found: FoundSearch) -> None:
        """End the search for all workers, and so the trials that are paused."""
        if found.ended:
            return
        for trial in found.at("paused"):
            step, eta = trial.step, found.etas[trial.rung - 1]
            why = f"{found.metric}={trial.value:.6g} at step {step} is not in the best 1/{eta:g}"
            self._tell(trial.number, trial_run.Pruned(why))
        self._study.set_user_attr("ended", _NOTHING_LEFT)
        log.info("the search ends: %s", _NOTHING_LEFT)

    def _end_in_mlflow(self) -> None:
        """Record that the pruned trials have ended, and upload it if the store answers in time."""
        pruned, found = [], self._found()
        for trial in found.at("pruned"):
            run = Path(found.output_dir) / trial.run
            if final_status.prune(run, f"pruned: {trial.reason}") and Uploaded.read(run):
                pruned.append(str(run))
        with suppress(OSError):  # `hpctrain status --upload` can do it later
            if pruned:
                run_module(
                    "hpctrain", "status", "--upload", *pruned, cwd=self._folder, timeout=_UPLOAD_S
                )
