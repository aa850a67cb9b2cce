"""Submit jobs to Slurm, and ask it for expected start times, limits and partitions."""

import functools
import operator
import re
import shutil
import subprocess
from collections.abc import Sequence
from contextlib import suppress

from hpctrain.base.errors import LaunchError
from hpctrain.cluster.slurm import node_kinds
from hpctrain.cluster.slurm.partition_limit import cluster_config
from hpctrain.cluster.slurm.patience import pause
from hpctrain.cluster.slurm.queue import NO_CONTROLLER, UnreachableError, call, me, queued
from hpctrain.config.job_request import JobRequest
from hpctrain.config.schema import LaunchConfig, SiteConfig


def available() -> bool:
    """Return whether this host can submit jobs: `sbatch` is on the PATH."""
    return shutil.which("sbatch") is not None


class SubmitLimitError(LaunchError):
    """The job array is over the cluster's limit of jobs per user, account or QOS."""


class FullQueueError(SubmitLimitError):
    """The controller takes no job of anybody now; sbatch has waited for two minutes before."""


def sbatch(
    command: Sequence[str], job: JobRequest, inherit: Sequence[int] = (), known: Sequence[str] = ()
) -> str:
    """Submit a script by this command of `sbatch --parsable`; return a text with the job's id.

    The command ends with the script, by whose path the queue shows the job later. `known` are the
    ids of its jobs that are queued already. `inherit` are file descriptors of locks. `sbatch`
    inherits them, so the locks are held until it has ended, even if this process is killed.

    Raises:
        LaunchError: The scheduler refuses the job. The message has its words and the config keys
            that they are probably about.
        SubmitLimitError: There are too many jobs.
        FullQueueError: There are too many, whosever they are.
        UnreachableError: The controller does not answer; the job may be queued or not.
    """
    script, timed_out = command[-1], False
    for _ in _PAUSES_S:
        # In a session of its own, where Ctrl-C does not interrupt it in the middle.
        done = call(*command, timeout_s=None, pass_fds=inherit, start_new_session=True)
        if not done.returncode:
            return job_id(done.stdout) or _find_job(script, "its answer has no job id", known)
        words = _words(done.stderr)
        timed_out |= _UNREACHABLE.search(words) is not None
        # After a timeout the job may be queued all the same, and may be the one over the limit.
        if timed_out and (found := _find_job(script, words, known)):
            return found
        if _LIMIT.search(words) or _FULL.search(words):
            kind = FullQueueError if _FULL.search(words) else SubmitLimitError
            raise kind(_refusal(words, job))
        if not _UNREACHABLE.search(words):
            raise LaunchError(_refusal(words, job))
    raise _unreachable(words)


def _words(said: str) -> str:
    """Return what sbatch itself has said, or all if no line is marked as its own, in one line."""
    own = [line for line in said.splitlines() if line.startswith("sbatch:")]
    return " ".join(" ".join(own or said.splitlines()).split())


def job_id(answer: str) -> str:
    """Return the job id in what `sbatch --parsable` and a site print; "" if there is none."""
    return next(
        (m[1] for line in answer.splitlines()[::-1] if (m := _ID.fullmatch(line.strip()))), ""
    )


def _find_job(script: str, words: str, known: Sequence[str]) -> str:
    """Return the job id of the unknown array with this script; "" if it is not in the queue."""
    for seconds in _PAUSES_S:
        pause(seconds, f"sbatch: {words}")
        with suppress(UnreachableError):
            jobs = queued([me()])
            own = [job for (path, _), job in jobs.items() if path == script]
            ids = {id.partition("_")[0] for job in own for id in (job.id, *job.behind)}
            return min(ids - {*known}, default="")
    raise _unreachable(words)


def _unreachable(words: str) -> UnreachableError:
    return UnreachableError(
        f"the controller does not answer ({words}); the same command checks whether the job is "
        "queued, and continues"
    )


_PAUSES_S = (1, 5, 15)
_ID = re.compile(r"(\d+)(;\S+)?")  # with the name of the cluster where there are several
# "job submit limit" is part of a general message about all QOS and association limits. The name of
# the particular limit, if there is one, comes before it.
_LIMIT = re.compile(r"Submit\w*Limit|^(?!.*\b(QOS|Assoc)\w+).*job submit limit", re.I)
# MaxJobCount of the whole cluster.
_FULL = re.compile(r"temporarily un|job queue full|unable to create job record", re.I)
_UNREACHABLE = re.compile(
    r"timed out|unable to contact|connection (refused|reset|closed|failure)|(send|receive) failure|"
    r"zero bytes|not connected|no route|network is unreachable|standby mode|(?<!record, )try again",
    re.I,
)


def expected_start(script: str, job: JobRequest) -> str:
    """Return when and where `sbatch --test-only` expects the text of a script to start.

    Raises:
        LaunchError: Slurm would refuse the job, or no nodes fit it, so that it could never start.
        UnreachableError: The controller does not answer within 10 s.
    """
    try:
        done = call("sbatch", "--test-only", input=script, timeout_s=_ANSWER_S)
    except subprocess.TimeoutExpired:
        raise UnreachableError(f"no answer in {_ANSWER_S} s") from None
    words = _words(done.stderr)
    if not done.returncode:
        return re.sub(r"^.*sbatch: Job \d+ ", "", words)
    if _UNREACHABLE.search(words):
        raise UnreachableError(words)
    if _LIMIT.search(words) or _FULL.search(words):
        return f"when there is room for more jobs ({words})"
    if _WRONG.search(words):
        raise LaunchError(_refusal(words, job))
    asked, fitting = job.nodes[0], nodes_that_fit(job.launch.of_job, job.site)
    if fitting is not None and asked > max(fitting.values()):
        raise LaunchError(_too_few(asked, fitting, job.launch, job.site, words))
    # Nodes that are down now, or a closed partition: sbatch accepts the job, which waits.
    return f"not now, it will wait ({words})"


def _too_few(
    asked: int, fitting: dict[str, int], launch: LaunchConfig, site: SiteConfig, words: str
) -> str:
    kind = site.gpu_type
    gpu = f"{kind} GPU" if kind else "GPU"
    whole = launch.of_job
    counts = {"CPU": whole.tasks_per_node * launch.cpus_per_task, gpu: whole.gpus_per_node}
    each = [f"{count} {what}{'s' * (count > 1)}" for what, count in counts.items() if count]
    each += [f"{whole.mem_gb:g} GiB"] if whole.mem_gb else []
    packed = f", launch.pack={launch.pack}" if launch.pack > 1 else ""
    there = ", ".join(f"{name}: {count}" for name, count in fitting.items())
    nodes = "1 node" if asked == 1 else f"{asked} nodes"
    return (
        f"launch.nodes={launch.nodes}: it needs {nodes} with {', '.join(each)} each "
        f"(launch.tasks_per_node={launch.tasks_per_node}, "
        f"launch.cpus_per_task={launch.cpus_per_task}, "
        f"launch.gpus_per_node={launch.gpus_per_node}{f', site.gpu_type={kind}' if kind else ''}, "
        f"launch.mem_gb={launch.mem_gb}{packed}); such nodes in the partition {there} "
        f"(sbatch: {words})"
    )


_ANSWER_S = 10
_WRONG = re.compile(r"\binvalid\b|can ?not be satisfied|unrecognized|illegal", re.I)


def nodes_that_fit(launch: LaunchConfig, site: SiteConfig) -> dict[str, int] | None:
    """Return how many nodes of each partition have the CPUs, memory and GPUs that a job needs.

    Nodes that are down or drained count, too. Partitions are those of `site.partition`, or if it is
    null, the default one. It is None if `sinfo` does not answer.
    """
    fitting: dict[str, int] = {}
    cpus = 0 if "overcommit" in site.sbatch else launch.tasks_per_node * launch.cpus_per_task
    try:
        kinds = node_kinds.kinds_in(site.partition)
    except UnreachableError:
        return None
    for kind in kinds:
        fits = kind.cpus >= cpus and kind.memory_mib >= 1024 * (launch.mem_gb or 0)
        fits &= kind.count("gpu", site.gpu_type) >= launch.gpus_per_node
        fitting[kind.partition] = fitting.get(kind.partition, 0) + fits * kind.nodes
    return fitting or None


@functools.cache
def max_array_size() -> int:
    """Return the most tasks that an array may have here; no answer is an UnreachableError."""
    if (config := cluster_config()) is None:
        raise UnreachableError(NO_CONTROLLER)
    limits = re.findall(r"(?:MaxArraySize|max_array_tasks)\s*=\s*(\d+)", config)
    return max(1, min(map(int, limits))) if limits else 1000


_SIZE = "launch.nodes launch.tasks_per_node launch.cpus_per_task launch.gpus_per_node launch.mem_gb"
# What sbatch says, and the config keys that it is probably about.
_SUSPECTS = {
    "partition": "site.partition",
    "account": "site.account",
    "qos": "site.qos",
    "feature": "site.constraint",
    "constraint": "site.constraint",
    "reservation": "site.sbatch",
    "license": "site.sbatch",
    "mail": "site.sbatch",
    "parameter too long": "output_dir",
    "memory": "launch.mem_gb site.memory_option",
    "time limit": "launch.time_min",
    "gres": "launch.gpus_per_node site.gpu_option site.gpu_type",
    "node count": "launch.nodes",
    "node configuration": _SIZE,
}


def _refusal(words: str, job: JobRequest) -> str:
    suspects = [
        f"{key}={operator.attrgetter(key)(job)}"
        for word, keys in _SUSPECTS.items()
        if word in words.lower()
        for key in keys.split()
    ]
    start = f"{', '.join(suspects)}: " if suspects else ""
    end = ""
    if "partition" in words.lower():
        end = f"; partitions here: {', '.join(partitions()) or 'unknown'}"
    return f"{start}sbatch refused the job: {words}{end}"


def partitions() -> list[str]:
    """Return the names of the cluster's partitions; none if `sinfo` does not answer."""
    with suppress(UnreachableError):
        return sorted({kind.partition for kind in node_kinds.kinds()})
    return []
