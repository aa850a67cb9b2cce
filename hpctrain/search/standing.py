"""How a search stands, for `status` and `report`: its trials by rung, the best, what it has cost.

Found (the study) ── state, rung, values ─┐
run directories ──── state, step, time ───┴── Standing
"""

import logging
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from rich.console import RenderableType
from rich.text import Text

from hpctrain.base.terminal.console import Table
from hpctrain.cluster.slurm.queue import UnreachableError
from hpctrain.commands.facts import Facts
from hpctrain.commands.select import is_search
from hpctrain.runs.sweep_overrides import label
from hpctrain.search.trials import FoundSearch, Trial
from hpctrain.search.worker_arrays import in_queue

log = logging.getLogger(__name__)
Rows = list[list[str]]


@dataclass(frozen=True)
class Standing:
    """A search, with its runs by name."""

    found: FoundSearch
    runs: Mapping[str, Facts]
    workers: Sequence[Facts] | None  # in the queue; None if the scheduler does not answer
    sweep: Path  # the folder of the search

    @classmethod
    def of(cls, sweep: Path | None, runs: Iterable[Facts]) -> Self | None:
        """Return how the search of a sweep's folder stands; None if it is no search.

        Without Optuna it is not known, either, and the log says so.
        """
        if sweep is None or not is_search(sweep):
            return None
        try:
            found = FoundSearch.of(sweep)
        except ImportError:
            log.warning("what the search has found is not known here: pip install optuna")
            return None
        workers = None
        with suppress(UnreachableError):
            workers = in_queue(sweep)
        return cls(found, {run.name: run for run in runs}, workers, sweep)

    def rungs(self) -> list[dict[str, Any]]:
        """Return how many trials have reached each rung, and the best value there."""
        rows, best = [], max if self.found.direction == "maximize" else min
        for number, rung in enumerate(self.found.rungs, 1):
            there = [trial for trial in self.found.trials if trial.rung >= number]
            # A rung of which the step is not known before is the last one.
            values = [trial.values.get(rung or trial.step, math.nan) for trial in there]
            promoted = sum(trial.goal > number for trial in there)
            found = best(filter(math.isfinite, values), default=None)
            counts = {"rung": number, "step": rung, "reached": len(there), "promoted": promoted}
            rows.append({**counts, "best": found})
        return rows

    @property
    def best(self) -> Trial | None:
        """The best trial that has finished; before there is one, the best of the highest rung."""
        begun = [trial for trial in self.found.trials if trial.rung]
        so_far = min(begun, key=lambda each: (-each.rung, self.found.rank(each)), default=None)
        return self.found.best or so_far

    @property
    def spent(self) -> float:
        """The hours of all attempts at the trials, times their ranks; a GPU has one rank."""
        runs = filter(None, (self.runs.get(trial.run) for trial in self.found.trials))
        return sum(run.trained_s(None, all_ranks=True) or 0.0 for run in runs) / 3600

    def said(self) -> list[str]:
        """Return in sentences which trial is the best, and what the search has cost."""
        found, best, lines = self.found, self.best, []
        if best is not None:
            so_far = "" if best.state == "finished" else " so far"
            lines.append(
                f"The best{so_far} is trial {best.number}, `{best.run}` ({values_of(best)}): "
                f"{found.metric} is {best.value:.5g} at step {best.step}."
            )
        if spent := self.spent:
            lines.append(f"The trials have taken {spent:.3g} device-hours.")
        return lines

    def tables(self) -> tuple[Rows, Rows]:
        """Return the rungs, and the trials: those that train, then the best of the highest rung.

        The first row of each has the heads.
        """
        found, rungs = self.found, self.rungs()
        counts = [
            ["" if not value and head != "best" else _text(value) for head, value in row.items()]
            for row in rungs
        ]
        steps = [f"at {step}" if step else "at the end" for step in found.rungs]
        trials = [
            [
                *(str(trial.number), trial.run, self._doing(trial)),
                *(_text(trial.values.get(step or trial.step)) for step in found.rungs),
                *(values_of(trial), trial.reason),
            ]
            for trial in sorted(found.trials, key=self._place)
        ]
        return [[*rungs[0]], *counts], [["trial", "run", "state", *steps, "values", "why"], *trials]

    def _place(self, trial: Trial) -> tuple[bool, int, tuple[float, int]]:
        value = self.found.rank(trial) if trial.values else (0.0, trial.number)
        return trial.state != "training", -trial.rung, value

    def _doing(self, trial: Trial) -> str:
        if trial.state != "training" or (run := self.runs.get(trial.run)) is None:
            return trial.state
        end = self.found.rungs[trial.goal - 1] or run.progress.max_steps or "?"
        where = f"{run.attempt.job_id} on {run.attempt.host}".removeprefix(" on ")
        return f"training {run.progress.step or 0}/{end}, {where}"

    def shown(self, most: int, rest: str = "--json") -> Iterator[RenderableType]:
        """Yield the tables for a terminal, with at most so many trials; `rest` shows the others."""
        for (heads, *rows), last in zip(self.tables(), (0, 1), strict=True):
            if not rows:
                continue
            table = Table(*heads, first_out=[len(heads) - 1, 1] * last)
            for row in rows[:most]:
                table.add_row(*row)
            yield table
            if len(rows) > most:
                yield Text(f"... {len(rows) - most} more ({rest})")
            yield Text()

    @property
    def title(self) -> str:
        """What is searched, and how many trials have begun, by their state."""
        found, states = self.found, Counter(trial.state for trial in self.found.trials)
        counts = "".join(f", {count} {state}" for state, count in sorted(states.items()))
        begun = f"{len(found.trials)} of {found.n_trials} trials{counts}"
        return f"search {found.study}: {begun}, {found.direction} {found.metric}"

    @property
    def is_under_way(self) -> bool:
        """Whether a worker runs or waits, as far as is known."""
        return bool(self.workers or self.found.at("training"))

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
        keys = ("study", "uid", "metric", "direction", "n_trials", "etas", "ended")
        return {key: getattr(self.found, key) for key in keys} | {
            "keys": [*self.found.space],
            "trials": [*map(asdict, self.found.trials)],
            "rungs": self.rungs(),
            "best": self.best and self.best.number,
            "workers": [{"job": w.job_id, "state": w.recorded_state} for w in self.workers or ()],
            "device_hours": self.spent,
        }


def _text(value: float | None) -> str:
    return "" if value is None else f"{value:.5g}"


def values_of(trial: Trial) -> str:
    """Return the parameters of a trial as a short text."""
    return label(
        f"{key}={value:.4g}" if isinstance(value, float) else f"{key}={value}"
        for key, value in trial.params.items()
    )
