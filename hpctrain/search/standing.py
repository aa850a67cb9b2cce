"""How a search stands, for `status` and `report`: its trials by rung, the best, what it has cost.

Found (the study) ── state, rung, values ─┐
run directories ──── state, step, time ───┴── Standing
"""

import logging
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from rich.console import RenderableType
from rich.text import Text

from hpctrain.console import Table
from hpctrain.runs.state.facts import Facts
from hpctrain.runs.state.state import step
from hpctrain.runs.sweep_overrides import label
from hpctrain.search.trials import Found, SearchFile, Trial
from hpctrain.search.worker_arrays import in_queue
from hpctrain.slurm.queue import UnreachableError

log = logging.getLogger(__name__)
_ALIVE_S = 60.0  # a run that trains writes its progress more often

HEADS = (
    *("rung", "step", "waiting", "training", "failed"),
    *("reached", "promoted", "paused", "pruned", "best"),
)


@dataclass(frozen=True)
class Standing:
    """A search, with its runs by name, at a time in seconds since the epoch."""

    found: Found
    runs: Mapping[str, Facts]
    workers: Sequence[Facts] | None  # in the queue; None if the scheduler does not answer
    sweep: Path  # the folder of the search
    space: dict[str, Any]  # Optuna's distribution of each parameter
    now: float

    @classmethod
    def of(cls, sweep: Path | None, runs: Iterable[Facts]) -> Self | None:
        """Return how the search of a sweep's folder stands; None if it is no search."""
        if sweep is None or (file := SearchFile.of(sweep)) is None:
            return None
        try:
            found = Found.of(sweep)
        except ImportError:
            log.warning("what the search has found is not known here: pip install optuna")
            return None
        workers = None
        with suppress(UnreachableError):
            workers = in_queue(sweep)
        known = {facts.name: facts for facts in runs}
        return cls(found, known, workers, sweep, file.distributions(), time.time())

    def state(self, trial: Trial) -> str:
        """Return the state of a trial. The lock of its owner may not be seen on this host."""
        facts = self.runs.get(trial.run)
        if trial.ended or facts is None or facts.recorded_state != "running":
            return trial.state
        return "training" if self.now - facts.progress.time < _ALIVE_S else trial.state

    def rungs(self) -> list[dict[str, Any]]:
        """Return how many trials are on the way to each rung, and what became of those there."""
        found, rows = self.found, []
        for number, rung in enumerate(found.rungs, 1):
            to_it = [self.state(trial) for trial in found.trials if trial.rung == number - 1]
            there = [trial for trial in found.trials if trial.rung >= number]
            at_rest = [self.state(trial) for trial in there if trial.rung == number]
            waiting = to_it.count("waiting") + to_it.count("promoted")
            promoted = sum(trial.goal > number for trial in there)
            # A rung of which the step is not known before is the last one.
            values = [trial.values.get(rung or trial.step, math.nan) for trial in there]
            values = [value for value in values if math.isfinite(value)]
            best = (max if found.direction == "maximize" else min)(values, default=None)
            counts = len(there), promoted, at_rest.count("paused"), at_rest.count("pruned")
            row = number, rung, waiting, to_it.count("training"), to_it.count("failed"), *counts
            rows.append(dict(zip(HEADS, (*row, best), strict=True)))
        return rows

    def cells(self) -> list[list[str]]:
        """Return the same as texts, one for each of HEADS; "" for none."""
        return [
            ["" if not value and head != "best" else _text(value) for head, value in row.items()]
            for row in self.rungs()
        ]

    @property
    def best(self) -> Trial | None:
        """The best trial that has finished; before there is one, the best of the highest rung."""
        begun = [trial for trial in self.found.trials if trial.rung]
        highest = max((trial.rung for trial in begun), default=0)
        there = [trial for trial in begun if trial.rung == highest]
        return self.found.best or min(there, key=self.found.rank, default=None)

    def hours(self, trial: Trial) -> float:
        """Return the hours of all attempts at a trial, times their ranks; a GPU has one rank."""
        if trial.run not in self.runs:
            return 0.0
        now = self.now if self.state(trial) == "training" else None
        return (self.runs[trial.run].trained_s(now, all_ranks=True) or 0.0) / 3600

    @property
    def spent(self) -> float:
        """The hours of all trials, times their ranks."""
        return sum(map(self.hours, self.found.trials))

    @property
    def full(self) -> float | None:
        """About the same if all these trials had made the steps of the last rung, or None."""
        rates = [
            self.hours(trial) / made
            for trial in self.found.trials
            if trial.run in self.runs and (made := step(self.runs[trial.run]))
        ]
        last = self.found.rungs[-1]
        begun = sum(trial.run != "" for trial in self.found.trials)
        return sum(rates) / len(rates) * last * begun if rates and last else None

    def said(self) -> list[str]:
        """Return in sentences which trial is the best, and what the search has cost and saved."""
        found, best, lines = self.found, self.best, []
        if best is not None:
            so_far = "" if best.state == "finished" else " so far"
            lines.append(
                f"The best{so_far} is trial {best.number}, `{best.run}` ({values_of(best)}): "
                f"{found.metric} is {best.value:.5g} at step {best.step}."
            )
        if spent := self.spent:
            text = f"The trials have taken {spent:.3g} device-hours"
            if full := self.full:
                text += f"; all of them up to step {found.rungs[-1]} would take about {full:.3g}"
                text += f" ({100 * max(0.0, 1 - spent / full):.0f}% saved)" if found.ended else ""
            lines.append(f"{text}.")
        return lines

    @property
    def heads(self) -> list[str]:
        """The titles of the columns of `trials`."""
        steps = (f"at {step}" if step else "at the end" for step in self.found.rungs)
        return ["trial", "run", "state", *steps, "values", "why"]

    def trials(self) -> list[list[str]]:
        """Return a row for each trial: those that train, then the best of the highest rung."""
        return [
            [
                *(str(trial.number), trial.run, self._doing(trial)),
                *(_text(trial.values.get(step or trial.step)) for step in self.found.rungs),
                *(values_of(trial), trial.reason),
            ]
            for trial in sorted(self.found.trials, key=self._place)
        ]

    def _place(self, trial: Trial) -> tuple[bool, int, tuple[float, int]]:
        value = self.found.rank(trial) if trial.values else (0.0, trial.number)
        return self.state(trial) != "training", -trial.rung, value

    def _doing(self, trial: Trial) -> str:
        state = self.state(trial)
        if state != "training" or trial.run not in self.runs:
            return state
        facts, goal = self.runs[trial.run], self.found.rungs[trial.goal - 1]
        end = goal or facts.progress.max_steps or "?"
        where = f"{facts.attempt.job_id} on {facts.attempt.host}".removeprefix(" on ")
        return f"training {facts.progress.step or 0}/{end}, {where}"

    def tables(self, most: int) -> Iterator[RenderableType]:
        """Yield the tables of rungs and of at most so many trials."""
        for heads, rows in ((HEADS, self.cells()), (self.heads, self.trials())):
            table = Table(*heads, first_out=[len(heads) - 1, 1] if heads is not HEADS else ())
            for row in rows[:most]:
                table.add_row(*row)
            yield table
            if len(rows) > most:
                yield Text(f"... {len(rows) - most} more (--all, --json)")
            yield Text()

    @property
    def title(self) -> str:
        """What is searched, and how many trials have begun."""
        found = self.found
        begun = f"{len(found.trials)} of {found.n_trials} trials"
        return f"search {found.study}: {begun}, {found.direction} {found.metric}"

    @property
    def is_under_way(self) -> bool:
        """Whether a worker runs or waits, as far as is known."""
        trains = any(self.state(trial) == "training" for trial in self.found.trials)
        return trains or bool(self.workers)

    def at_work(self) -> list[str]:
        """Return in sentences what the workers do, and what the user may do now."""
        jobs = [worker.job for worker in self.workers or () if worker.job]
        wait = [job for job in jobs if job.state == "PENDING"]
        lines = [f"Worker {job.id} is {job.needs}." for job in jobs if job.needs]
        if jobs:
            why = f" in the queue ({wait[0].reason})" if wait else ""
            lines.append(f"Workers: {len(jobs) - len(wait)} running, {len(wait)} waiting{why}.")
        if self.found.ended:
            return [*lines, f"The search is over: {self.found.ended}."]
        if self.workers is None:
            return ["The scheduler does not answer: what the workers do is not known."]
        logs = f"the logs of its workers: {self.sweep}/workers"
        return lines if self.is_under_way else [f"No worker runs: the same command goes on; {logs}"]

    def facts(self) -> dict[str, Any]:
        """Return the search for `print_json`."""
        found, best = self.found, self.best
        keys = ("study", "uid", "metric", "direction", "n_trials", "etas", "widths", "ended")
        return {key: getattr(found, key) for key in keys} | {
            "keys": [*found.space],
            "trials": [asdict(each) | {"state": self.state(each)} for each in found.trials],
            "rungs": self.rungs(),
            "best": None if best is None else best.number,
            "workers": [{"job": w.job_id, "state": w.recorded_state} for w in self.workers or ()],
            "device_hours": self.spent,
            "device_hours_without_rungs": self.full,
        }


def _text(value: float | None) -> str:
    return "" if value is None else f"{value:.5g}"


def values_of(trial: Trial) -> str:
    """Return the parameters of a trial as a short text."""
    return label(
        f"{key}={value:.4g}" if isinstance(value, float) else f"{key}={value}"
        for key, value in trial.params.items()
    )
