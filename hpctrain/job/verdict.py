"""Decide what happens to a job whose ranks have ended with an error.

    batch script ── srun ── ranks
         │            └── exit code other than 0
         ├── python -m hpctrain.job.verdict RUN_DIR CODE STEP
         │       prints `restart`, `restart --exclude=HOSTS`, `requeue`, `cancel` or nothing
         └── the next srun, scontrol requeue, or scancel

A rank that is killed, for example by the host's out-of-memory killer, can neither requeue its job
nor say why it ended, and Slurm only counts the job as failed. So the batch script asks here. What
follows is in `hpctrain.restarts.policy`. Scripts of older versions give no STEP, and know no
`restart`.

The batch script calls Slurm's commands, because this program may run in a container without them.
"""

import logging
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from hpctrain.causes import named
from hpctrain.config.frozen import load
from hpctrain.disk import opener
from hpctrain.errors import HpctrainError
from hpctrain.rendezvous.ranks import RankInfo
from hpctrain.restarts import policy
from hpctrain.run_record import AttemptKey
from hpctrain.runs.run_dir import RunDir
from hpctrain.runs.state.ending import verdict
from hpctrain.tracking import final_status
from hpctrain.tracking.uploader_process import python_module

log = logging.getLogger(__name__)
_START_S = 60.0  # how long the uploader may take to import mlflow


def close_tracking(run: RunDir, code: int) -> None:
    """Record the end of a run whose rank 0 was killed, or did not know the cause, and upload it.

    The upload takes at most `tracking.drain_s`.
    """
    tracking = load(run.config_file).tracking
    if not tracking.enabled:
        return
    attempt = run.read().attempt
    failed = attempt.state == "failed"
    reason = named(attempt.cause, attempt.error if failed else attempt.reason)
    reason = reason or f"the ranks ended with exit code {code}"
    status = "FAILED" if failed else "KILLED"
    if final_status.is_open(run.path):
        final_status.close(run.path, status, reason)
    elif not failed or not final_status.correct(run.path, status, reason):
        return
    if tracking.upload:
        command, env = python_module(
            "hpctrain.tracking.uploading.uploader", str(run.path), f"--drain={tracking.drain_s}"
        )
        with (
            open(run.path / "journal" / "uploader.log", "ab", opener=opener(2)) as output,
            suppress(subprocess.TimeoutExpired),
        ):
            subprocess.run(
                command,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                timeout=tracking.drain_s + _START_S,
            )


def main(argv: list[str]) -> int:
    """Print the verdict on the run directory, exit code and number of the step in `argv`."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    job = RankInfo.from_env(os.environ | {"HPCTRAIN_LAUNCHER": "single"})
    try:
        run, code, inside = RunDir.open(Path(argv[0])), int(argv[1]), len(argv) > 2
        key = AttemptKey(job.job_id, job.restart_count, int(argv[2]) if inside else 0)
        last = run.read().attempt.key  # a script without STEP may have started several steps, too
        key = last if not inside and last[:2] == key[:2] else key
        warn_s = load(run.config_file).launch.warn_s
        answer = verdict(run, code, key, inside=inside, warn_s=warn_s)
        print(answer)
        if answer.partition(" ")[0] not in policy.GOES_ON:
            close_tracking(run, code)
    except HpctrainError as error:  # the ranks have told it, too
        log.error("%s", error)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
