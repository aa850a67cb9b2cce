"""Waits for the jobs that measure layouts: a bar for each on a terminal, plain lines elsewhere.

zero3, 8 ranks (12_0) ━━━━━━━╸━━━━ 15/25 running
ddp, 8 ranks (12_1)   ━━━━━━━━━━━━ 25/25 finished
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from hpctrain import run_record
from hpctrain.launch.jobs import RunJob
from hpctrain.launch.output import Bars, say
from hpctrain.plan.measured.short_run import STEPS

_POLL_S = (1.0, 5.0)
"""Seconds between two looks at the jobs: at first, and at most; squeue is asked less often."""
_ENDED = ("finished", "failed")


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
