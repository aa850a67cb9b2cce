"""The part of the batch scripts that starts the ranks, and starts them again in the same job.

    run_steps ── choose nodes ── srun of the ranks ──┬── end of srun ──────────────┐
       ▲                                             └── hang.json ── scancel STEP ┤
       │                                                                           ▼
       ├──────────── restart [--exclude=HOSTS] ──────────────────────── hpctrain.job.verdict
       └── no good nodes, or Slurm ends the job ── requeue ◀───────────────────────┘

It is one shell text, `steps.sh`: the scripts of sweeps contain it, and the templates in `slurm/`
evaluate what `python -m hpctrain.slurm.steps` prints.
"""

import os
import time
from collections.abc import Mapping
from pathlib import Path

from hpctrain.run_record import Attempt

_LEAST_S = 120.0  # for the start of the ranks and some steps, beside launch.warn_s
_STOPS = "SIGTERM", "SIGUSR2", "SIGINT", "cancel"
TEXT = Path(__file__).with_name("steps.sh").read_text(encoding="utf-8")
"""The shell functions of the batch scripts, of which `run_steps` starts the ranks."""


def may_begin(attempt: Attempt, warn_s: float, env: Mapping[str, str] = os.environ) -> bool:
    """Return whether another step may begin in this job, now that this attempt has ended.

    It may not if Slurm has ended the ranks, at a preemption or shortly before the time limit, nor
    if the job has too little time left. It then waits in the queue for another start.
    """
    if attempt.state == "interrupted" and attempt.reason in _STOPS:
        return False
    end = env.get("SLURM_JOB_END_TIME", "")
    return not end.isdecimal() or int(end) - time.time() > warn_s + _LEAST_S


if __name__ == "__main__":
    print(TEXT, end="")
