"""`plan --measure`: short trainings of the best layouts, submitted together, and what they measure.

best layouts ── short_run ── Sweep: one array for each number of nodes ── wait ── measured_run
                                └── Ctrl-C, or a refused job: those in the queue are cancelled

A layout that fails in its job has the cause in place of its times.
"""

import dataclasses
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from hpctrain import run_record
from hpctrain.causes import one_line
from hpctrain.errors import ConfigError, HpctrainError
from hpctrain.estimates.measured_run import MeasuredRun, measured_run
from hpctrain.launch.entry import Entry
from hpctrain.launch.jobs import RunJob
from hpctrain.launch.output import Bars, say
from hpctrain.launch.sweeps.sweep import Sweep
from hpctrain.plan.measured.short_run import STEPS, chosen, minutes, short_run
from hpctrain.plan.predicting.estimate import Estimate
from hpctrain.run_record import RunRecord
from hpctrain.runs.run_dir import RunDir
from hpctrain.runs.state import stop_request
from hpctrain.slurm import queue

_POLL_S = (1.0, 5.0)  # seconds between two looks at the jobs: at first, and at most
_ENDED = ("finished", "failed")


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
    def samples_per_s(self) -> float | None:
        """The samples of all ranks in a second."""
        return self.estimate.layout.batch.global_size / self.step_s if self.step_s else None

    @property
    def tokens_per_s_per_gpu(self) -> float | None:
        """The tokens of a rank in a second; None if samples have none."""
        rate, tokens = self.samples_per_s, self.estimate.tokens
        return rate * tokens / self.estimate.layout.ranks if rate and tokens else None

    @property
    def step_error(self) -> float | None:
        """The predicted time of a step divided by the measured one, minus 1."""
        time = self.estimate.time
        return time.step_s / self.step_s - 1 if time and self.step_s else None

    @property
    def predicted_peak(self) -> int:
        """The predicted memory of tensors in bytes: without that of CUDA, NCCL and gaps."""
        return self.estimate.memory.total - self.estimate.memory.allowance

    @property
    def peak_error(self) -> float | None:
        """The predicted memory of tensors divided by the measured peak, minus 1."""
        peak = self.found and self.found.peak_bytes
        return self.predicted_peak / peak - 1 if peak else None

    def as_json(self) -> dict[str, Any] | None:
        """Return the object `measured` of a layout; None if its job has failed."""
        if self.found is None:
            return None
        found = ("steps", "mfu", "data_wait", "communication", "peak_bytes")
        own = ("step_s", "samples_per_s", "tokens_per_s_per_gpu", "step_error", "peak_error")
        return {
            "run": str(self.run),
            "job": self.job,
            **{name: getattr(self.found, name) for name in found},
            **{name: getattr(self, name) for name in own},
        }


@dataclass
class Followed:
    """A job that is waited for."""

    name: str  # for a reader
    job: RunJob
    state: str = "pending"  # in words

    @property
    def step(self) -> int:
        """The step that the run has reached."""
        return run_record.Progress.of(self.job.run.path).step or 0

    def look(self) -> bool:
        """Look at the job; return whether it has ended."""
        if self.state in _ENDED:
            return True
        ended = self.job.done()
        failed = self.job.run.read().state == "failed"
        if failed and not ended and self.job.state == "PENDING":
            # Out of memory: it would start again with smaller micro-batches, as another layout.
            self.job.cancel(check=False)
            ended = True
        if not ended:
            self.state = self.job.state.lower()
            return False
        finished = self.job.run.read().state == "finished"
        self.state = "finished" if finished else "failed"
        return True


def measure(
    estimates: Sequence[Estimate], overrides: Sequence[str], output_dir: str
) -> list[Measured]:
    """Submit the best layouts, wait, and return what they have measured, in `measure/TIME`.

    The estimates come best first, but one of the command line is the first of all. If the scheduler
    refuses a job (LaunchError), or after Ctrl-C (KeyboardInterrupt), those in the queue are
    cancelled.
    """
    first = estimates[0] if estimates else None
    if first is not None and first.fits is False and first.layout.named:
        raise ConfigError(
            f"--measure: the layout of the command line ({first.layout.kind}) does not fit, so it "
            "is not submitted; name another, or leave out hardware, which measures it in any case"
        )
    groups = chosen(estimates)
    if not groups:
        raise ConfigError("--measure: no layout fits on these nodes; give more with --nodes")
    folder = Path(output_dir) / "measure" / datetime.now().strftime("%Y-%m-%d_%H-%M-%S_%f")
    sweep = Sweep(folder / "sweeps" / "layouts", followed=True)
    best = [estimate for group in groups for estimate in group]
    for group in groups:
        for one in group:
            _add(sweep, overrides, one, minutes(group))
    try:
        sweep.submit()
        jobs = [
            Followed(f"{one.layout.kind}, {one.layout.ranks} ranks", job)
            for one, job in zip(best, sweep.jobs(), strict=True)
            if isinstance(job, RunJob)
        ]
        wait(jobs)
    except BaseException:
        _cancel(sweep.entries, folder)
        raise
    return [_result(estimate, each.job) for estimate, each in zip(best, jobs, strict=True)]


def wait(jobs: Sequence[Followed]) -> None:
    """Return when all jobs have ended; their states are kept up to date."""
    pause = _POLL_S[0]
    with Bars("{task.description}") as progress:
        bars = [
            progress.add_task(f"{one.name} ({one.job.job_id})", total=STEPS, note="")
            for one in jobs
        ]
        told = [""] * len(jobs)
        while True:
            ended = [one.look() for one in jobs]
            for i, one in enumerate(jobs):
                progress.update(bars[i], completed=one.step, note=one.state)
                if progress.disable and one.state != told[i]:
                    say(f"{one.name} ({one.job.job_id}): {one.state}")
                told[i] = one.state
            if all(ended):
                return
            time.sleep(pause)
            pause = min(_POLL_S[1], pause * 1.2)


def _add(sweep: Sweep, overrides: Sequence[str], one: Estimate, limit_min: int) -> None:
    """Add a run with a directory of its own: layouts do not change the result, and so not the name.

    The name in the config stays, because the jobs of an array have one.
    """
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
        waiting = {task: job for task, job in queue.queued({queue.me()}).items() if task in tasks}
        for task in waiting:
            with suppress(OSError):
                stop_request.write(tasks[task].run.path, queue.me())
        queue.cancel(job.id for job in waiting.values())
    except HpctrainError as error:
        say(f"{error}; `squeue --me` shows the jobs, and scancel ends them", style="red")
        return
    ids = ", ".join(job.id for job in waiting.values())
    say(f"cancelled {ids or 'nothing, all jobs have ended'}; what was measured is in {folder}")


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
    batch, rows = estimate.layout.batch, record.micro_batch_rows
    asked = estimate.layout.config.train.micro_batch_size
    if rows is None or asked == "auto" or rows >= batch.micro:
        return ""
    return f"out of memory with micro-batches of {batch.micro}, measured with {rows}"
