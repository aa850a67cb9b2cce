"""Talk to the scheduler: submit, ask, wait, requeue."""

from __future__ import annotations

import getpass
import logging
import shutil
import subprocess
import time
from pathlib import Path

from hpctrain.config import Config
from hpctrain.errors import LaunchError
from hpctrain.launch.environment import clean_environment

log = logging.getLogger(__name__)


def available() -> bool:
    """Whether jobs can be submitted from here."""
    return shutil.which("sbatch") is not None


def sbatch(script: Path, config: Config) -> str:
    """Submit a script.

    Returns:
        The (array) job's id.

    Raises:
        LaunchError: with the scheduler's own words and the keys that it is likely about.
    """
    command = ["sbatch", "--parsable", str(script)]
    done = subprocess.run(
        command, env=clean_environment(), capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise LaunchError(_refusal(" ".join(done.stderr.split()), config))
    return done.stdout.strip().partition(";")[0]


def _refusal(words: str, config: Config) -> str:
    keys = {
        "partition": f"site.partition={config.site.partition}",
        "account": f"site.account={config.site.account}",
        "qos": f"site.qos={config.site.qos}",
        "feature": f"site.constraint={config.site.constraint}",
        "constraint": f"site.constraint={config.site.constraint}",
        "memory": f"launch.mem_gb={config.launch.mem_gb}",
        "time limit": f"launch.time_min={config.launch.time_min}",
        "gres": f"launch.gpus_per_node={config.launch.gpus_per_node}",
        "node count": f"launch.nodes={config.launch.nodes}",
        "node configuration": (
            f"launch.nodes={config.launch.nodes}, "
            f"launch.tasks_per_node={config.launch.tasks_per_node}, "
            f"launch.cpus_per_task={config.launch.cpus_per_task}, "
            f"launch.gpus_per_node={config.launch.gpus_per_node}, "
            f"launch.mem_gb={config.launch.mem_gb}"
        ),
    }
    about = [shown for word, shown in keys.items() if word in words.lower()]
    hint = f"{', '.join(about)}: " if about else ""
    offer = ""
    if "partition" in words.lower():
        offer = f"; partitions here: {', '.join(partitions()) or 'unknown'}"
    return f"{hint}sbatch refused the job: {words}{offer}"


def partitions() -> list[str]:
    """Names of the cluster's partitions, as far as `sinfo` answers."""
    done = _ask("sinfo", "--noheader", "--format=%R")
    return sorted(set(done.split())) if done else []


def queued_jobs() -> dict[str, str]:
    """This user's jobs, waiting or running: id (`ARRAYJOB_TASK` for array tasks) to state.

    Raises:
        LaunchError: the controller does not answer: submitting now might double a run.
    """
    answer = _ask(
        "squeue", "--noheader", "--array", f"--user={getpass.getuser()}", "--format=%i %T"
    )
    if answer is None:
        raise LaunchError("squeue does not answer: is the controller up (scontrol ping)?")
    return dict(line.split(maxsplit=1) for line in answer.splitlines() if line.strip())


def wait(jobs: list[str], poll_s: float = 3.0) -> None:
    """Return when none of the jobs is in the queue any more; one `squeue` a poll for all."""
    while set(jobs) & set(queued_jobs()):
        time.sleep(poll_s)


def requeue(job_id: str) -> bool:
    """Put this running job back into the queue; False, with the reason logged, if that fails.

    A job that exits by itself inside the grace time of a preemption is COMPLETED and never
    requeued: it would be lost without a word.

    Args:
        job_id: as `squeue` takes it; `ARRAYJOB_TASK` for an array task, for the plain id would
            take the whole array along.
    """
    # `scancel` sends SIGTERM too, but its job is no longer RUNNING: it must not come back.
    state = (_ask("squeue", "--noheader", "--jobs", job_id, "--format=%T") or "unknown").strip()
    if state != "RUNNING":
        log.info("job %s is %s: not requeued", job_id, state)
        return False
    if _ask("scontrol", "requeue", job_id) is None:
        return False
    log.info("job %s is requeued", job_id)
    return True


def _ask(*command: str) -> str | None:
    """What a command of the scheduler prints; None, with the reason logged, if it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except subprocess.CalledProcessError as error:
        log.error("%s: %s", " ".join(command), (error.stderr or error.stdout).strip())
    except (OSError, subprocess.TimeoutExpired) as error:
        log.error("%s: %s", " ".join(command), error)
    else:
        return done.stdout
    return None
