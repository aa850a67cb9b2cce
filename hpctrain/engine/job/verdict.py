"""The verdict for a batch script whose ranks have ended with an error.

    batch script ── srun ── ranks
         │            └── exit code other than 0
         ├── python -m hpctrain.engine.job.verdict RUN_DIR CODE STEP
         │       prints `restart`, `restart --exclude=HOSTS`, `requeue`, `cancel`, `leave` or ""
         └── the next srun, scontrol requeue, or scancel

A rank that is killed, for example by the host's out-of-memory killer, can neither requeue its job
nor say why it ended, and Slurm only counts the job as failed. So the batch script asks here. How it
is decided is in `runs.state.verdict`. Scripts of older versions give no STEP, and know no
`restart`.

The folder of a worker takes the place of RUN_DIR in the script of a search, which judges then
(`offered.pieces.of_worker`).

The batch script calls Slurm's commands, because this program may run in a container without them.
"""

import logging
import os
import sys
from pathlib import Path

from hpctrain.base import offered
from hpctrain.base.errors import HpctrainError
from hpctrain.base.names.run_record import AttemptKey
from hpctrain.base.processes.causes import named
from hpctrain.base.processes.child import run_module
from hpctrain.cluster.ranks.ranks import RankInfo
from hpctrain.config.frozen import load
from hpctrain.runs.run_dir import RunDir
from hpctrain.runs.state.shared_job import is_elsewhere
from hpctrain.runs.state.verdict import GOES_ON, LEAVES, after_srun
from hpctrain.tracking import final_status
from hpctrain.tracking.uploading.child_uploader import START_S

log = logging.getLogger(__name__)


def close_tracking(run: RunDir, code: int) -> None:
    """Record the end of a run whose rank 0 was killed, or did not know the cause, and upload it.

    The upload takes at most `tracking.drain_s` from the start of MLflow.
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
        run_module(
            "hpctrain.tracking.uploading.uploader",
            *(str(run.path), f"--drain={tracking.drain_s}"),
            cwd=run.path,
            timeout=tracking.drain_s + START_S,
            log_file=run.path / "journal" / "uploader.log",
        )


def of_run(run: RunDir, code: int, key: AttemptKey, *, inside: bool) -> str:
    """Return the words of the verdict on a run whose ranks have ended, and record it."""
    warn_s = load(run.config_file).launch.warn_s
    return after_srun(run, code, key, inside=inside, warn_s=warn_s)


def is_over(words: str) -> bool:
    """Return whether a run does not go on, by the verdict on it."""
    return words.partition(" ")[0] not in (*GOES_ON, LEAVES)


def main(argv: list[str]) -> int:
    """Print the verdict on the folder, exit code and number of the step in `argv`.

    With a run directory and the path of the script of a job that several runs share, print "left"
    and the exit code of the run if it does not go on in this job.
    """
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    job = RankInfo.from_env(os.environ | {"HPCTRAIN_LAUNCHER": "single"})
    try:
        folder = Path(argv[0])
        if not argv[1].isdecimal():
            shared = RunDir.open(folder)
            shared.update()  # NFS caches the content of a folder until the client writes there
            failed = int(shared.read().state == "failed")
            print(f"left {failed}" if is_elsewhere(shared.path, argv[1]) else "")
            return 0
        code, inside = int(argv[1]), len(argv) > 2
        key = AttemptKey(job.job_id, job.restart_count, int(argv[2]) if inside else 0)
        over: RunDir | None
        if (folder / "worker.json").exists():
            over, words = offered.pieces.of_worker(folder, code, key)
        else:
            run = RunDir.open(folder)
            last = run.read().attempt.key  # a script without STEP may have started several, too
            key = last if not inside and last[:2] == key[:2] else key
            words = of_run(run, code, key, inside=inside)
            over = run if is_over(words) else None
        print(words)
        if over is not None:
            close_tracking(over, code)
    except HpctrainError as error:  # the ranks have told it, too
        log.error("%s", error)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
