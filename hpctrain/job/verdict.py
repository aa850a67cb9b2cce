"""Decide what happens to a job whose ranks have ended with an error.

    batch script ── srun ── ranks
         │            └── exit code other than 0
         ├── python -m hpctrain.job.verdict RUN_DIR CODE STEP
         │       prints `restart`, `restart --exclude=HOSTS`, `requeue`, `cancel` or nothing
         └── the next srun, scontrol requeue, or scancel

A rank that is killed, for example by the host's out-of-memory killer, can neither requeue its job
nor say why it ended, and Slurm only counts the job as failed. So the batch script asks here, where
the facts are gathered: what the ranks, their observers, Slurm and Linux have said. What follows
from them is in `hpctrain.restarts.policy`. Scripts of older versions give no STEP, and know no
`restart`.

The batch script calls Slurm's commands, because this program may run in a container without them.
"""

import logging
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from hpctrain.config.frozen import load
from hpctrain.disk import opener
from hpctrain.errors import HpctrainError
from hpctrain.rendezvous.ranks import AttemptKey, RankInfo
from hpctrain.restarts import policy
from hpctrain.restarts.policy import Answer, End, Room
from hpctrain.run_record import Attempt
from hpctrain.runs.run_dir import RunDir
from hpctrain.runs.state import ending, failure, stop_request
from hpctrain.slurm import own_job
from hpctrain.tracking import final_status
from hpctrain.tracking.uploader_process import python_module

log = logging.getLogger(__name__)
_START_S = 60.0  # how long the uploader may take to import mlflow


def verdict(
    run: RunDir, code: int, key: AttemptKey, *, inside: bool = False, warn_s: float = 0.0
) -> str:
    """Return what the batch script must do with its job, and record what has happened.

    None of the run's ranks is alive, and the code, that of srun, is not 0. The answer is "restart",
    if the script can do that (`inside`), with the nodes to avoid; "requeue"; "cancel", with which
    Slurm shows the job as cancelled and not as failed; or "". `warn_s` is that of `launch`.
    """
    run.update()  # NFS caches the content of a folder until the client writes there
    known, last = run.read(), run.last_checkpoint()
    request = stop_request.read(run.path, since=known.submitted)
    error = failure.first(run.path, key)
    now = known.attempt
    # If not, the ranks ended before rank 0 has begun an attempt.
    begun = (now.job_id, now.restart_count, now.step_id) == key
    now = now if begun else Attempt()
    if now.verdict:  # by rank 0, or by a process like this one
        decided = Answer(now.verdict, avoid=now.avoid)
        return "cancel" if request and decided.goes_on else decided.words(inside=inside)
    told = error or now.state == "interrupted" or ending.hang(run.path, key)
    if now.state == "finished" or (code <= 128 and not told):
        return ""
    if error and failure.is_of_other_holder(error.error):  # run.json is about that process
        return ""
    if not begun:
        facts: dict[str, Any] = key._asdict()
        if error:  # `logs` shows what was written since the start
            facts["started"] = failure.path(run.path).stat().st_mtime
        run.begin_attempt(launcher="slurm", first_step=last, **facts)
        known = run.read()
    room = Room.of(os.environ, known, inside=inside, left_s=own_job.left_s(), warn_s=warn_s)
    end = ending.end(run.path, known, code, key, room.left_s)
    if request and not end.raised:
        text = now.reason if now.state == "interrupted" else f"cancelled by {request.by}"
        end = End(request.cause, text)
    answer = policy.answer(known, end, room, last)
    kept = answer.record(last)
    if now.ended is not None:  # as rank 0 has recorded it
        kept |= {"ended": now.ended} | ({} if now.step is None else {"step": now.step})
    run.end_attempt(**kept)
    begins = f"goes on from its checkpoint of step {last}" if last else "starts at step 0 again"
    if not end.raised:  # else the ranks have told it
        log.error("%s%s", answer.reason, f": the run {begins}" * answer.goes_on)
    return answer.words(inside=inside)


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
        run, code, inside = RunDir.open(Path(argv[0])), int(argv[1]), len(argv) > 2
        key = AttemptKey(job.job_id, job.restart_count, int(argv[2]) if inside else 0)
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
