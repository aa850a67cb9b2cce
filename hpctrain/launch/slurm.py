"""Talk to the scheduler: ask what it would do, submit, requeue."""

from __future__ import annotations

import functools
import logging
import re
import shutil
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from hpctrain.config.schema import Config
from hpctrain.errors import LaunchError
from hpctrain.launch.environment import clean_environment
from hpctrain.launch.queue import UnreachableError, ask, me, queued

log = logging.getLogger(__name__)


def available() -> bool:
    """Whether jobs can be submitted from here."""
    return shutil.which("sbatch") is not None


class SubmitLimitError(LaunchError):
    """The cluster takes no more jobs of this user, or not as many at once."""


def sbatch(script: Path, config: Config, inherit: Sequence[int] = ()) -> str:
    """Submit a script.

    Args:
        script: its path is how the queue is asked for the job later.
        config: for the explanation of a refusal.
        inherit: open files for `sbatch` to hold until it is done, should this process be killed.

    Returns:
        The array job's id.

    Raises:
        LaunchError: with the scheduler's own words and the keys that it is likely about.
        SubmitLimitError: there are too many of them.
        UnreachableError: the controller does not answer; the job may be queued or not.
    """
    timed_out = False
    for _ in _PAUSES_S:
        # Ctrl-C must not reach it: half a submission is what the lock is there to prevent.
        done = _run_sbatch("--parsable", str(script), pass_fds=inherit, start_new_session=True)
        if not done.returncode:
            return done.stdout.strip().partition(";")[0]
        words = " ".join(done.stderr.split())
        timed_out |= _UNREACHABLE.search(words) is not None
        # What timed out may have arrived all the same, and be what the limit is reached by.
        if timed_out and (job := _arrived(script, words)):
            return job
        if _LIMIT.search(words):
            raise SubmitLimitError(_refusal(words, config))
        if not _UNREACHABLE.search(words):
            raise LaunchError(_refusal(words, config))
    raise _unreachable(words)


def _arrived(script: Path, words: str) -> str:
    """The array job of this script; "" when the controller answers that it has none.

    Raises:
        UnreachableError: it does not answer, so that a second `sbatch` might be one too many.
    """
    for pause in _PAUSES_S:
        time.sleep(pause)
        with suppress(UnreachableError):
            jobs = queued([me()])
            ids = (job.id for (path, _), job in jobs.items() if path == str(script))
            return next(ids, "").partition("_")[0]
    raise _unreachable(words)


def _unreachable(words: str) -> UnreachableError:
    return UnreachableError(
        f"the controller does not answer ({words}); the same command looks whether the job has "
        "arrived, and goes on"
    )


_PAUSES_S = (1, 5, 15)
# The general message names this limit whichever it is; the particular one stands before it.
_LIMIT = re.compile(r"Submit\w*Limit|^(?!.*\b(QOS|Assoc)\w+).*job submit limit", re.I)
_UNREACHABLE = re.compile(r"timed out|unable to contact|connection (refused|reset)|try again", re.I)


def expected_start(script: str, config: Config) -> str:
    """What `sbatch --test-only` says of the text of a script: when it would start, and where.

    Raises:
        LaunchError: it would be refused.
    """
    done = _run_sbatch("--test-only", input=script)
    words = " ".join(done.stderr.split())
    if done.returncode and _LIMIT.search(words):
        return f"when there is room for more jobs ({words})"
    if done.returncode:
        raise LaunchError(_refusal(words, config))
    return re.sub(r"^sbatch: Job \d+ ", "", words)


def _run_sbatch(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["sbatch", *arguments],
        env=clean_environment(),
        capture_output=True,
        text=True,
        check=False,
        **options,
    )


@functools.cache
def max_array_size() -> int:
    """The largest number of tasks of one array here.

    Raises:
        UnreachableError: the controller does not answer.
    """
    config = ask("scontrol", "show", "config")
    if config is None:
        raise UnreachableError("scontrol does not answer: is the controller up (scontrol ping)?")
    limits = re.findall(r"(?:MaxArraySize|max_array_tasks)\s*=\s*(\d+)", config)
    return max(1, min(map(int, limits))) if limits else 1000


def _refusal(words: str, config: Config) -> str:
    keys = {
        "partition": f"site.partition={config.site.partition}",
        "account": f"site.account={config.site.account}",
        "qos": f"site.qos={config.site.qos}",
        "feature": f"site.constraint={config.site.constraint}",
        "constraint": f"site.constraint={config.site.constraint}",
        "reservation": f"site.reservation={config.site.reservation}",
        "license": f"site.licenses={config.site.licenses}",
        "mail": f"site.mail_type={config.site.mail_type}",
        "parameter too long": f"output_dir={config.output_dir}",
        "memory": (
            f"launch.mem_gb={config.launch.mem_gb}, site.memory_option={config.site.memory_option}"
        ),
        "time limit": f"launch.time_min={config.launch.time_min}",
        "gres": (
            f"launch.gpus_per_node={config.launch.gpus_per_node}, "
            f"site.gpu_option={config.site.gpu_option}, site.gpu_type={config.site.gpu_type}"
        ),
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
    done = ask("sinfo", "--noheader", "--format=%R")
    return sorted(set(done.split())) if done else []
