"""`plan --measure`: short trainings of the best layouts, and what they measure beside predictions.

best layouts ── short_run ── Sweep: one array for each number of nodes ── wait ── Comparison
                                └── Ctrl-C, or a refused job: those in the queue are cancelled

A short training makes 5 steps that start everything, and after a report 20 steps in 4 reports,
which count. A learning rate that rises over all steps keeps the numbers finite, and takes no time.
"""

import copy
import dataclasses
import itertools
import math
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from hpctrain.causes import one_line
from hpctrain.config.schema import Config
from hpctrain.console import Console, Table
from hpctrain.errors import ConfigError, HpctrainError
from hpctrain.estimates.measured_run import ENOUGH_STEPS, MeasuredRun, measured_run
from hpctrain.launch.entry import Entry
from hpctrain.launch.jobs import RunJob
from hpctrain.launch.output import say
from hpctrain.launch.sweeps.sweep import Sweep
from hpctrain.plan.layouts import Layout
from hpctrain.plan.predicting.estimator import Estimate
from hpctrain.plan.predicting.timing import StepTime
from hpctrain.plan.sentences import command_of
from hpctrain.run_record import RunRecord
from hpctrain.runs.run_dir import RunDir
from hpctrain.runs.state import stop_request
from hpctrain.slurm import queue
from hpctrain.units import GIB

_POLL_S = (1.0, 5.0)  # seconds between two looks at the jobs: at first, and at most
_ENDED = ("finished", "failed")
_MOST = 3  # layouts that are measured on each number of ranks
_REPORT = 5
STEPS = _REPORT + ENOUGH_STEPS
_START_S, _SLOWER = 600.0, 3.0  # what the time limit allows beside the predicted time


@dataclass(frozen=True)
class Measured:
    """A layout after its job."""

    estimate: Estimate  # the layout, and what was predicted
    run: Path
    job: str  # `ARRAYJOB_TASK`
    found: MeasuredRun | None  # None if its job has failed
    cause: str = ""  # why it has failed, or had smaller micro-batches than planned; else ""

    @property
    def step_s(self) -> float | None:
        """The median of the seconds of a step."""
        return None if self.found is None else self.found.step_s

    @property
    def speed(self) -> Estimate:
        """The layout with the measured time of a step in place of the predicted one."""
        time = self.step_s and StepTime(self.step_s, *[math.nan] * 6)
        return dataclasses.replace(self.estimate, time=time or None)

    @property
    def step_error(self) -> float | None:
        """The predicted time of a step divided by the measured one, minus 1."""
        time = self.estimate.time
        return time.step_s / self.step_s - 1 if time and self.step_s else None

    @property
    def peak_error(self) -> float | None:
        """The predicted memory of tensors divided by the measured peak, minus 1."""
        peak = self.found and self.found.peak_bytes
        return self.estimate.memory.tensors / peak - 1 if peak else None

    def as_json(self) -> dict[str, Any] | None:
        """Return the object `measured` of a layout; None if its job has failed."""
        if self.found is None:
            return None
        found = ("steps", "mfu", "data_wait", "communication", "peak_bytes", "step_s")
        return {
            "run": str(self.run),
            "job": self.job,
            **{name: getattr(self.found, name) for name in found},
            "samples_per_s": self.speed.samples_per_s,
            "tokens_per_s_per_gpu": self.speed.tokens_per_s_per_gpu,
            "step_error": self.step_error,
            "peak_error": self.peak_error,
        }


def measure(
    estimates: Sequence[Estimate], overrides: Sequence[str], output_dir: str
) -> list[Measured]:
    """Submit the best layouts, wait, and return what they have measured, in `measure/TIME`.

    The estimates come best first, but one of the command line is the first of all. After a
    LaunchError or Ctrl-C (KeyboardInterrupt) the jobs in the queue are cancelled.
    """
    if any(one.fits is False and one.layout.named for one in estimates[:1]):
        raise ConfigError(
            f"--measure: the layout of the command line ({estimates[0].layout.kind}) does not fit, "
            "so it is not submitted; name another, or leave out hardware, which measures it in any "
            "case"
        )
    groups = chosen(estimates)
    if not groups:
        raise ConfigError("--measure: no layout fits on these nodes; give more with --nodes")
    folder = Path(output_dir) / "measure" / datetime.now().strftime("%Y-%m-%d_%H-%M-%S_%f")
    sweep = Sweep(folder / "sweeps" / "layouts", followed=True)
    best = [(one, minutes(group)) for group in groups for one in group]
    for one, limit_min in best:
        _add(sweep, overrides, one, limit_min)
    try:
        sweep.submit()
        jobs = [job for job in sweep.jobs() if isinstance(job, RunJob)]
        names = (f"{one.layout.kind}, {one.layout.ranks} ranks" for one, _ in best)
        wait([*zip(names, jobs, strict=True)])
    except BaseException:
        _cancel(sweep.entries, folder)
        raise
    return [_result(one, job) for (one, _), job in zip(best, jobs, strict=True)]


def wait(jobs: Sequence[tuple[str, RunJob]]) -> None:
    """Return when all jobs have ended; each state of a job is said."""
    pause, states = _POLL_S[0], [""] * len(jobs)
    while not {*states} <= {*_ENDED}:
        for i, (name, job) in enumerate(jobs):
            if states[i] in _ENDED:
                continue
            before, states[i] = states[i], _state(job)
            if states[i] != before:
                say(f"{name} ({job.job_id}): {states[i]}")
        time.sleep(pause)
        pause = min(_POLL_S[1], pause * 1.2)


def _state(job: RunJob) -> str:
    """Return the state of a job in words; one of `_ENDED` if it has ended."""
    ended, state = job.done(), job.run.read().state
    if state == "failed" and not ended and job.state == "PENDING":
        # Out of memory: it would start again with smaller micro-batches, as another layout.
        job.cancel(check=False)
    elif not ended:
        return job.state.lower()
    return "finished" if state == "finished" else "failed"


def _add(sweep: Sweep, overrides: Sequence[str], one: Estimate, limit_min: int) -> None:
    """Add a run with a directory of its own; the config's name stays, for an array has one."""
    config = short_run(one, sweep.folder.parents[1], limit_min)
    number, kind = len(sweep.entries), one.layout.kind.replace("+", "-")
    sweep.add([*overrides, *one.layout.overrides], lambda _: config)
    for entry in sweep.entries[number:]:  # none, if the config is wrong
        named = dataclasses.replace(config, name=f"{number}-{kind}")
        entry.run = RunDir.of(named, entry.run.data_digest)


def _cancel(entries: Sequence[Entry], folder: Path) -> None:
    """Cancel the jobs that are in the queue, and say so."""
    tasks = {entry.task: entry for entry in entries if entry.task is not None}
    if not tasks:
        return
    try:
        jobs = {task: job.id for task, job in queue.queued({queue.me()}).items() if task in tasks}
        for task in jobs:
            with suppress(OSError):
                stop_request.write(tasks[task].run.path, queue.me())
        queue.cancel(jobs.values())
    except HpctrainError as error:
        say(f"{error}; `squeue --me` shows the jobs, and scancel ends them", style="red")
        return
    ids = ", ".join(jobs.values()) or "nothing, all jobs have ended"
    say(f"cancelled {ids}; what was measured is in {folder}")


def _result(estimate: Estimate, job: RunJob) -> Measured:
    run, made = job.run.path, partial(Measured, estimate, job.run.path, job.job_id)
    record = job.run.read()
    if record.state == "finished":
        try:
            return made(measured_run(run), _smaller(estimate, record))
        except ConfigError as error:
            return made(None, str(error))
    told = one_line(record.attempt.error or record.attempt.reason)
    return made(None, told or f"the job has ended as {job.state}")


def _smaller(estimate: Estimate, record: RunRecord) -> str:
    """Return that the micro-batches did not fit, and the run has taken smaller ones; else ""."""
    micro, rows = estimate.layout.batch.micro, record.micro_batch_rows
    asked = estimate.layout.config.train.micro_batch_size
    if rows is None or asked == "auto" or rows >= micro:
        return ""
    return f"out of memory with micro-batches of {micro}, measured with {rows}"


def chosen(estimates: Sequence[Estimate]) -> list[list[Estimate]]:
    """Return the first three of each number of nodes and ranks, which will be one job array."""
    found: dict[tuple[int, int], list[Estimate]] = {}
    for one in estimates:
        if one.fits is not False:
            found.setdefault((one.layout.nodes, one.layout.ranks), []).append(one)
    return [group[:_MOST] for group in found.values()]


def short_run(estimate: Estimate, folder: Path, minutes: int) -> Config:
    """Return the config of the training that measures a layout."""
    config, nothing = copy.deepcopy(estimate.layout.config), Config()
    config.output_dir, config.metric, config.scaling = str(folder), "train/loss", None
    data, train, checkpoint = config.data, config.train, config.checkpoint
    data.val_split, data.val_sets, data.fold = None, [], None
    data.group = None if data.subset is None else data.group
    config.notify = nothing.notify
    config.scheduler = nothing.scheduler
    config.scheduler.kind, config.scheduler.warmup_steps = "constant", STEPS
    train.max_steps, train.max_epochs, train.log_every = STEPS, None, _REPORT
    train.batch_size_ramp, train.eval_every = [], None
    train.early_stopping = nothing.train.early_stopping
    train.profile = None
    checkpoint.best, checkpoint.at_end = None, False
    checkpoint.every_steps = STEPS + 1
    tracking = config.tracking
    tracking.enabled, tracking.upload, tracking.also = True, False, []
    launch = config.launch
    launch.nodes, launch.wait, launch.rerun = estimate.layout.nodes, False, nothing.launch.rerun
    launch.time_min = minutes
    return config


def minutes(estimates: Sequence[Estimate]) -> int:
    """Return a time limit that lets the jobs start soon; never more than that of the run."""
    launch = estimates[0].layout.config.launch
    slowest = max(math.inf if one.time is None else one.time.step_s for one in estimates)
    seconds = _START_S + _SLOWER * STEPS * slowest + launch.warn_s
    return math.ceil(min(60 * launch.limit_min, seconds) / 60)


class Comparison:
    """The layouts that were measured; `overrides` are those of the command line.

    They are ranked by nodes and ranks, then by the measured step; a failed one is last.
    """

    def __init__(self, results: Sequence[Measured], overrides: Sequence[str]) -> None:
        self._overrides = overrides
        self.ranked = sorted(results, key=lambda one: (*_size(one), one.step_s or math.inf))

    @property
    def fastest(self) -> list[Measured]:
        """The fastest layout of each number of nodes and ranks, of those that were measured."""
        good = [one for one in self.ranked if one.found is not None]
        return [next(group) for _, group in itertools.groupby(good, _size)]

    def put_into(self, answer: dict[str, Any], estimates: Sequence[Estimate]) -> None:
        """Add what was measured to the object that `--json` prints."""
        by_id = {id(one.estimate): one for one in self.ranked}
        for entry, estimate in zip(answer["layouts"], estimates, strict=True):
            one = by_id.get(id(estimate))
            entry["measured"] = one and one.as_json()
            entry["note"] = one.cause if one else f"not among the first {_MOST} on its ranks"
        fastest = [
            {"ranks": layout.ranks, "overrides": [*layout.overrides], "command": command}
            for layout, command in map(self._command, self.fastest)
        ]
        answer["measurement"] = {"fastest": fastest, "runs": [str(one.run) for one in self.ranked]}

    def _command(self, one: Measured) -> tuple[Layout, str]:
        layout = one.estimate.layout
        return layout, command_of(self._overrides, layout.overrides)

    def show(self, console: Console) -> None:
        """Print the table, and the commands that follow from it."""
        console.print("\nmeasured beside predicted; an error is that of the prediction")
        table = Table(
            *("layout", "ranks", "predicted", "step", "error", "samples/s", "peak", "error")
        )
        for one in self.ranked:
            layout, time = one.estimate.layout, one.estimate.time
            peak = None if one.found is None else one.found.peak_bytes
            table.add_row(
                *(
                    layout.name,
                    str(layout.ranks),
                    _text(None if time is None else time.step_s, "{:.4f} s"),
                ),
                *(_text(one.step_s, "{:.4f} s", "failed"), _text(one.step_error, "{:+.1%}")),
                _text(one.speed.samples_per_s, "{:,.0f}"),
                *(
                    "-" if peak is None else f"{peak / GIB:.2f} GiB",
                    _text(one.peak_error, "{:+.1%}"),
                ),
            )
        console.print(table)
        for one in filter(lambda one: one.cause, self.ranked):
            console.print(f"{one.estimate.layout.name}: {one.cause}")
            if one.found is None:
                console.print(f"  its log: python -m hpctrain logs {one.run}", soft_wrap=True)
        for layout, command in map(self._command, self.fastest):
            console.print(f"\nthe fastest on {layout.ranks} ranks: {layout.name}")
            console.print(f"  {command}", soft_wrap=True)


def _size(one: Measured) -> tuple[int, int]:
    return one.estimate.layout.nodes, one.estimate.layout.ranks


def _text(value: float | None, form: str, without: str = "-") -> str:
    return without if value is None else form.format(value)
