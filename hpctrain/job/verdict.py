"""Decide what happens to a job whose ranks have ended with an error.

    batch script ── srun ── ranks
         │            └── exit code other than 0
         ├── python -m hpctrain.job.verdict RUN_DIR CODE   prints `requeue`, `cancel` or nothing
         └── scontrol requeue, or scancel

A rank that is killed, for example by the host's out-of-memory killer, can neither requeue its job
nor say why it ended, and Slurm only counts the job as failed. So the batch script requeues it. It
also requeues a job in which a rank hangs, of which the other ranks or NCCL's watchdog tell, or in
which a GPU has a fault, and one whose GPU was out of memory. A run that fails by another error of
its own is not requeued, since the error would come again.

The batch script calls Slurm's commands, because this program may run in a container without them.
"""

import logging
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from hpctrain.causes import ANOTHER_RANK, GPU_FAULT, LATE_RANK, cause_of
from hpctrain.config.frozen import load
from hpctrain.disk import opener
from hpctrain.errors import HpctrainError
from hpctrain.rendezvous import flight_recorder
from hpctrain.rendezvous.ranks import RankInfo
from hpctrain.run_record import AttemptKey
from hpctrain.runs.run_dir import RunDir
from hpctrain.runs.state import failure, stop_request
from hpctrain.slurm.requeue import may_requeue
from hpctrain.tracking import final_status
from hpctrain.tracking.uploader_process import python_module

log = logging.getLogger(__name__)
_START_S = 60.0  # how long the uploader may take to import mlflow


def verdict(run: RunDir, code: int, key: AttemptKey) -> str:
    """Return what the batch script must do with its job, and record what has happened.

    None of the run's ranks is alive, and the code, that of srun, is not 0. The answer is "requeue";
    "cancel", with which Slurm shows the job as cancelled and not as failed; or "".
    """
    run.update()  # NFS caches the content of a folder until the client writes there
    record = run.read()
    cancelled = stop_request.read(run.path, since=record.submitted) is not None
    attempt = record.attempt
    # If not, the ranks ended before rank 0 has begun an attempt.
    begun = (attempt.job_id, attempt.restart_count, attempt.step_id) == key
    state = record.state if begun else ""
    last = run.last_checkpoint()
    first = last if attempt.first_step is None or not begun else attempt.first_step
    if state == "interrupted":  # rank 0 has saved
        if cancelled:
            return "cancel"
        # While it runs, the job was not requeued: not for long enough without a step, or in vain.
        again = attempt.reason != "SIGINT" and may_requeue(key.restart_count, first, last)
        return "requeue" if again else ""
    error = failure.read(run.path, key)
    if state == "finished" or (code <= 128 and not error):
        return ""
    if error and failure.is_of_other_holder(error):  # run.json is about that process
        return ""
    if not begun:
        facts: dict[str, Any] = key._asdict()
        if error:  # `logs` shows what was written since the start
            facts["started"] = failure.path(run.path).stat().st_mtime
        run.begin_attempt(launcher="slurm", **facts)
    told = error if error and cause_of(error) in (LATE_RANK, GPU_FAULT) else ""
    if record.lowered_in == key:
        rows = record.micro_batch_rows
        run.end_attempt("interrupted", reason=f"out of memory: now {rows} rows", step=last)
        return "cancel" if cancelled else "requeue"
    if error and not told:
        # Slurm has ended rank 0 before it could record anything, or rank 0 does not know the cause.
        if state != "failed" or cause_of(attempt.error) is ANOTHER_RANK:
            run.end_attempt("failed", error=error)
        return ""
    told = told.removeprefix("LateRankError: ") or flight_recorder.timeout(run.logs, key.job_id)
    cause = told or f"a rank was killed (exit code {code})"
    if cancelled or may_requeue(key.restart_count, first, last):
        run.end_attempt("interrupted", reason=cause, step=last)
        goes_on = (
            f"goes on from its checkpoint of step {last}" if last else "starts at step 0 again"
        )
        log.error("%s: the run %s", cause, goes_on)
        return "cancel" if cancelled else "requeue"
    cure = "" if told else "If the host had no memory left, raise launch.mem_gb; "
    error = (
        f"{cause}, and no checkpoint was saved since the last restart: not requeued. {cure}"
        "`resume` starts the run again"
    )
    run.end_attempt("failed", error=error)
    log.error("%s", error)
    return ""


def close_tracking(run: RunDir, code: int) -> None:
    """Record the end of a run whose rank 0 was killed, or did not know the cause, and upload it.

    The upload takes at most `tracking.drain_s`.
    """
    tracking = load(run.config_file).tracking
    if not tracking.enabled:
        return
    attempt = run.read().attempt
    failed = attempt.state == "failed"
    reason = (
        attempt.error if failed else attempt.reason
    ) or f"the ranks ended with exit code {code}"
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
        run, code = RunDir.open(Path(argv[0])), int(argv[1])
        step_id = int(argv[2]) if len(argv) > 2 else 0
        action = verdict(run, code, AttemptKey(job.job_id, job.restart_count, step_id))
        print(action)
        if action != "requeue":
            close_tracking(run, code)
    except HpctrainError as error:  # the ranks have told it, too
        log.error("%s", error)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
