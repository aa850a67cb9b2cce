"""`plan --measure`: short trainings of the best layouts, and what they measure beside predictions.

best layouts ── short_run ── Sweep: one array for each number of nodes ── compare ── show
                                └── Ctrl-C, or a refused job: those in the queue are cancelled

A short training makes 5 steps that start everything, and after a report 20 steps in 4 reports,
which count. A learning rate that rises over all steps keeps the numbers finite, and takes no time.
"""

import copy
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from hpctrain.base.names.run_record import RunRecord
from hpctrain.base.processes.causes import one_line
from hpctrain.base.terminal.console import Console
from hpctrain.base.units import GIB
from hpctrain.config.identity import run_path
from hpctrain.config.schema import Config
from hpctrain.errors import ConfigError, HpctrainError
from hpctrain.insight.estimates.measured_run import ENOUGH_STEPS, MeasuredRun, measured_run
from hpctrain.insight.plan.planned import PlannedTraining
from hpctrain.insight.plan.predicting.estimator import Estimate
from hpctrain.insight.plan.printing import Columns, command_of, layout_of, print_rows, seconds
from hpctrain.launch.entry import Entry
from hpctrain.launch.output import say
from hpctrain.launch.sweeps.sweep import Sweep
from hpctrain.runs.run_dir import RunDir

_MOST = 3  # layouts that are measured on each number of ranks
_REPORT = 5
STEPS = _REPORT + ENOUGH_STEPS
_START_S, _SLOWER = 600.0, 3.0  # what the time limit allows beside the predicted time


class Measured(NamedTuple):
    """A layout after its job."""

    estimate: Estimate  # the layout, and what was predicted
    run: Path
    found: MeasuredRun | None  # None if its job has failed
    cause: str = ""  # why it has failed, or had smaller micro-batches than planned; else ""

    def facts(self) -> dict[str, Any] | None:
        """Return the object `measured` of a layout; None if its job has failed.

        An error is what was predicted divided by what was measured, minus 1.
        """
        if (found := self.found) is None:
            return None
        one, peak = self.estimate, found.peak_bytes
        rate = one.layout.batch.global_size / found.step_s
        return {
            **{name: getattr(found, name) for name in ("steps", "mfu", "peak_bytes", "step_s")},
            "samples_per_s": rate,
            "tokens_per_s_per_gpu": rate * one.tokens / one.layout.ranks if one.tokens else None,
            "step_error": one.time.step_s / found.step_s - 1 if one.time else None,
            "peak_error": one.memory.tensors / peak - 1 if peak else None,
        }


def measure(
    estimates: Sequence[Estimate],
    overrides: Sequence[str],
    output_dir: str,
    whole: Callable[[PlannedTraining], Config],
) -> list[Measured]:
    """Submit the best layouts, wait, and return what they have measured, in `measure/TIME`.

    The estimates come best first, but one of the command line is the first of all. `whole` makes
    the config of a run of the sections that were estimated. After a
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
    sweep = Sweep(folder / "sweeps" / "layouts")
    best = [one for group in groups for one in group]
    for group in groups:
        for one in group:
            _add(sweep, overrides, one, short_run(one, folder, minutes(group), whole))
    try:
        sweep.submit()
    except BaseException:
        _cancel(sweep, folder)
        raise
    return [_result(one, entry) for one, entry in zip(best, sweep.entries, strict=True)]


def _add(sweep: Sweep, overrides: Sequence[str], one: Estimate, short: Config) -> None:
    """Add a run with a directory of its own; the config's name stays, for an array has one."""
    number, kind = len(sweep.entries), one.layout.kind.replace("+", "-")
    sweep.add([*overrides, *one.layout.overrides], lambda _: short)
    for entry in sweep.entries[number:]:  # none, if the config is wrong
        named = dataclasses.replace(short, name=f"{number}-{kind}")
        digest = entry.run.data_digest
        entry.run = RunDir(run_path(named, digest), digest)


def _cancel(sweep: Sweep, folder: Path) -> None:
    """Cancel the jobs that are in the queue, and say so."""
    try:
        jobs = [job for job in sweep.jobs() if job.job_id and not job.done()]
        for job in jobs:
            job.cancel()
    except HpctrainError as error:
        say(f"{error}; `squeue --me` shows the jobs, and scancel ends them", style="red")
        return
    if jobs:
        ids = ", ".join(job.job_id for job in jobs)
        say(f"cancelled {ids}; what was measured is in {folder}")


def _result(estimate: Estimate, entry: Entry) -> Measured:
    run, record = entry.run.path, entry.run.read()
    if record.state == "finished":
        few = f"it has measured fewer than {ENOUGH_STEPS} steps"
        found = measured_run(run)
        return Measured(estimate, run, found, _smaller(estimate, record) if found else few)
    told = one_line(record.attempt.error or record.attempt.reason)
    return Measured(estimate, run, None, told or f"the run is {record.state or 'lost'}")


def _smaller(estimate: Estimate, record: RunRecord) -> str:
    """Return that the micro-batches did not fit, and the run has taken smaller ones; else ""."""
    micro, rows = estimate.layout.batch.micro, record.micro_batch_rows
    asked = estimate.layout.training.train.micro_batch_size
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


def short_run(
    estimate: Estimate, folder: Path, minutes: int, whole: Callable[[PlannedTraining], Config]
) -> Config:
    """Return the config of the training that measures a layout."""
    config, nothing = copy.deepcopy(whole(estimate.layout.training)), Config()
    config.output_dir, config.metric, config.scaling = str(folder), "train/loss", None
    data, train, checkpoint = config.data, config.train, config.checkpoint
    data.val_split, data.val_sets, data.fold = None, [], None
    data.group = None if data.subset is None else data.group
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
    launch.nodes, launch.wait, launch.rerun = estimate.layout.nodes, True, nothing.launch.rerun
    launch.time_min = minutes
    return config


def minutes(estimates: Sequence[Estimate]) -> int:
    """Return a time limit that lets the jobs start soon; never more than that of the run."""
    launch = estimates[0].layout.training.launch
    slowest = max(math.inf if one.time is None else one.time.step_s for one in estimates)
    seconds = _START_S + _SLOWER * STEPS * slowest + launch.warn_s
    return math.ceil(min(60 * launch.limit_min, seconds) / 60)


def compare(
    answer: dict[str, Any],
    estimates: Sequence[Estimate],
    results: Sequence[Measured],
    overrides: Sequence[str],
) -> None:
    """Add what was measured to the facts of the answer, whose layouts are the estimates.

    The fastest of each number of nodes and ranks has its command; `overrides` are those of the
    command line.
    """
    by_id = {id(one.estimate): one for one in results}
    for entry, estimate in zip(answer["layouts"], estimates, strict=True):
        one = by_id.get(id(estimate))
        entry["measured"], entry["run"] = (one.facts(), str(one.run)) if one else (None, None)
        entry["note"] = one.cause if one else f"not among the first {_MOST} on its ranks"
    good = [one for one in _ranked(answer) if one["measured"]]
    fastest = [next(group) for _, group in groupby(good, lambda one: (one["nodes"], one["ranks"]))]
    answer["fastest"] = [
        {"layout": one["layout"], "ranks": one["ranks"], "overrides": one["overrides"]}
        | {"command": command_of(overrides, one["overrides"])}
        for one in fastest
    ]


def show(console: Console, answer: Mapping[str, Any]) -> None:
    """Print what was measured, and the commands that follow from it."""
    rows = _ranked(answer)
    title = "measured beside predicted; an error is that of the prediction"
    print_rows(console, title, rows, _COLUMNS)
    for one in rows:
        if one["note"]:
            log = f"; python -m hpctrain logs {one['run']}" * (one["measured"] is None)
            console.print(f"{one['layout']}: {one['note']}{log}", soft_wrap=True)
    for one in answer["fastest"]:
        console.print(f"\nthe fastest on {one['ranks']} ranks: {one['layout']}")
        console.print(f"  {one['command']}", soft_wrap=True)


def _ranked(answer: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the layouts that had a job by nodes, ranks and step; a failed one is last."""

    def place(one: Mapping[str, Any]) -> tuple[int, int, float]:
        step = one["measured"]["step_s"] if one["measured"] else math.inf
        return one["nodes"], one["ranks"], step

    return sorted((one for one in answer["layouts"] if one["run"]), key=place)


def _measured(name: str, form: str, unit: float = 1, without: str = "") -> Any:
    """Return what makes a cell of a figure that was measured."""

    def cell(one: Mapping[str, Any]) -> str:
        value = (one["measured"] or {}).get(name)
        return without if value is None else form.format(value / unit)

    return cell


_COLUMNS: Columns = {
    "layout": layout_of,
    "ranks": lambda one: str(one["ranks"]),
    "predicted": lambda one: seconds(one["step_s"]),
    "step": _measured("step_s", "{:.4f} s", without="failed"),
    "error": _measured("step_error", "{:+.1%}"),
    "samples/s": _measured("samples_per_s", "{:,.0f}"),
    "peak": _measured("peak_bytes", "{:.2f} GiB", GIB),
    "error of peak": _measured("peak_error", "{:+.1%}"),
}
