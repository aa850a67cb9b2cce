"""The text of the batch script of a job array. Nothing here reads or writes a file.

Each array task finds its run directory in the list beside the script, by its number:

    array-0/job.sh   array-0/tasks: /home/me/runs/digits-3fa92c1b, /home/me/runs/digits-…

With launch.pack=2 task 0 has the first two of them, task 1 the next two, and so on.
"""

import math
import os
import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from hpctrain.base.errors import ConfigError
from hpctrain.base.secrets import shell_word
from hpctrain.cluster.slurm import steps
from hpctrain.cluster.slurm.container import (
    CHOOSE_GPUS,
    GPUS,
    REQUEUE_NOTE,
    in_container,
    shell_words,
)
from hpctrain.cluster.slurm.job_environment import TRUST
from hpctrain.cluster.slurm.requeue import CHAIN, GRACE, LEAD
from hpctrain.cluster.slurm.sbatch_options import (
    Options,
    check_folder,
    choose_nodes,
    joined_hosts,
    rank_options,
    sbatch_options,
    step_gpu_options,
)
from hpctrain.config.job_request import JobRequest
from hpctrain.config.schema import LaunchConfig, SiteConfig

_IN_STEPS = ("run", "work")  # what steps.sh starts again; others run once
_CHECKED = """\
# Without `set -eu`, which modules, conda and /etc/profile.d do not support: the exit code of each
# command is checked instead.
checked() {
    local code=$?
    ((code == 0)) && return
    echo "error: $1 failed with exit code $code; the ranks were not started" >&2
    ! declare -F end_expedited >/dev/null || end_expedited
    exit "$code"
}"""


# On a busy file system Python takes minutes to start, and until then a preemption's SIGTERM would
# kill it. Slurm requeues only jobs that still run when the grace time ends.
_IGNORE_SIGNALS = """/bin/sh -c 'trap "" TERM USR2; exec "$@"' rank"""


_SHARED_GPUS = """
# srun would give each rank access to its own GPU only, without NVLink or shared memory for NCCL.
unset SLURM_GPUS_PER_TASK SLURM_TRES_PER_TASK SLURM_GPU_BIND SLURM_TRES_BIND"""


# `before` are the jobs of the chain before this one. Slurm starts a job of a chain in the second in
# which it ends the one before, which may still save. Who cancels a job means the run.
_CHAIN = """
export {CHAIN}={ids}
chain={ids}
# `run_steps` calls it when the run has ended for good. A job that goes on, or was preempted, leaves
# the others. With an id in any case: without one, scancel would cancel all jobs that wait.
end_chain() {{ scancel --state=PENDING "$SLURM_ARRAY_JOB_ID" $(<"$chain") 2>/dev/null; }}
before=$(sed "/^$SLURM_ARRAY_JOB_ID\\$/,\\$d" "$chain" | paste --serial --delimiters=,)
i=0
if [[ -n $before ]]; then
    while ((i++ < 20)) && [[ $(squeue --noheader --states=COMPLETING --jobs="$before") ]]; do
        sleep $((i < 5 ? 2 * i : 20)) # 5 minutes in all: sites limit calls
    done 2>/dev/null
    said=$(squeue --noheader --states=all --format=%T --jobs="$before" 2>/dev/null
        sacct --allocations --parsable2 --format=State --jobs="$before")
    if [[ $said == *CANCELLED* ]]; then
        echo "the job of this chain before this one was cancelled, and so the run" >&2
        end_chain
        exit 1
    fi
fi"""


# Before the modules, which may fail, too; a plain `code` is that of the ranks or of `checked`.
_EXPEDITED = """
# Slurm would hold an expedited job that fails, as if it might still come back.
end_expedited() { ((code == 0)) || scontrol update "JobId=$SLURM_JOB_ID" Requeue=0; }"""


_RUN = """
run=$(sed -n "$((SLURM_ARRAY_TASK_ID + 1))p" {tasks})
[[ -d ${{run:?is not in the list}} && -d $run/logs ]] || mkdir "$run/logs\""""


# A step without an amount of memory would get that of the whole job, and the others would wait.
_RUNS = """
first=$((SLURM_ARRAY_TASK_ID * {pack} + 1))
mapfile -t runs < <(sed -n "$first,$((first + {pack} - 1))p" {tasks})
: "${{runs[0]:?is not in the list}}"
[[ -z ${{SLURM_MEM_PER_NODE:-}} ]] || export SLURM_MEM_PER_NODE=$((SLURM_MEM_PER_NODE / {pack}))"""


_RUN_STEPS = """
ranks() {{
    exec {ranks}
}}
verdict() {{
    {verdict} "$@"
}}
job=${{SLURM_ARRAY_JOB_ID}}_$SLURM_ARRAY_TASK_ID

{steps}
{run}
exit "$code\""""


class JobOrder(NamedTuple):
    """When and where the tasks of an array may run."""

    max_running: int | None = None  # at a time; None: no limit
    dependency: str | None = None  # the value of sbatch's option, such as `afterany:123`
    # The name of the jobs if the script is submitted several times for one run: they run one after
    # another, and the file `job_id` beside the script has their ids.
    chain: str = ""
    exclude: Sequence[str] = ()  # hosts, beside those of site.sbatch.exclude


_AT_ONCE = JobOrder()


def sbatch_script(
    job: JobRequest,
    folder: Path,
    count: int,
    *,
    pythonpath: Sequence[Path] = (),
    image: Sequence[str] = (),
    order: JobOrder = _AT_ONCE,
    command: str = "run",
    lead_s: int | None = None,
    grace_s: int | None = None,
) -> str:
    """Return the batch script for `count` runs that need the same resources, those of `job`.

    `folder` is absolute and has the list `tasks` of COUNT run directories, and the folder `batch`
    for the output of the script itself. What Slurm cannot accept in `site` or a path is a
    ConfigError.

    Python imports first from `pythonpath`, the folders of a code snapshot. An environment that
    travels is named by `image`: its archive, and the folder of the snapshot or "". The ranks call
    `command`, which is `run`, `work` or `call`, with the folder of the array task. The job is told
    `lead_s` seconds before its time limit to save (None: launch.warn_s), and `grace_s` seconds
    after a preemption it is cancelled, unless it has requeued itself.
    """
    check_folder(job.output_dir, folder)
    lead_s = job.launch.warn_s if lead_s is None else lead_s
    if command != "run":
        job = replace(job, launch=replace(job.launch, pack=1))
    pack = job.launch.pack
    options = sbatch_options(job.name, job.launch.of_job, job.site, job.nodes, lead_s)
    last = math.ceil(count / pack) - 1
    options["array"] = f"0-{last}" + (f"%{order.max_running}" if order.max_running else "")
    dependency = order.dependency
    if order.chain:
        options["job-name"] = order.chain
        dependency = ",".join(filter(None, (dependency, "singleton")))
    if dependency is not None:
        options["dependency"] = dependency
    expedited = options["requeue"] == "expedite" and command in _IN_STEPS
    if not expedited:  # a function begins anew: no reason to be put before all others
        options["requeue"] = True
    if order.exclude:
        options["exclude"] = joined_hosts(str(options.get("exclude", "")), *order.exclude)
    options["output"] = f"{folder}/batch/%A_%a.log"
    options["open-mode"] = "append"
    parts = [
        "#!/bin/bash",
        *_directives(options),
        *([_EXPEDITED] if expedited else []),
        *lines_of_ranks(job, pythonpath),
        (_RUNS if pack > 1 else _RUN).format(tasks=shlex.quote(str(folder / "tasks")), pack=pack),
    ]
    if command in _IN_STEPS:
        parts.append(f"export {LEAD}={lead_s} {GRACE}={grace_s or ''}")
    if order.chain:
        parts.append(_CHAIN.format(CHAIN=CHAIN, ids=shlex.quote(str(folder / "job_id"))))
    return "\n".join([*parts, *_srun(job, folder, pythonpath, image, command)]) + "\n"


def lines_of_ranks(job: JobRequest, pythonpath: Sequence[Path] = ()) -> Iterator[str]:
    """Yield the lines that give a shell the environment of the ranks."""
    yield from _setup(job.launch, job.site)
    yield from _snapshot(job.output_dir, pythonpath)


def _directives(options: Options) -> Iterator[str]:
    for name, value in options.items():
        yield f"#SBATCH --{name}" + ("" if value is True else f"={_quote_for_slurm(str(value))}")


def _quote_for_slurm(text: str) -> str:
    r"""Quote for an #SBATCH line: unlike in a shell, '…' does not protect a backslash there."""
    if re.fullmatch(r"[\w@%+=:,./-]+", text, re.ASCII):
        return text
    return '"' + re.sub(r'(["\\])', r"\\\1", text) + '"'


def _setup(launch: LaunchConfig, site: SiteConfig) -> Iterator[str]:
    if site.modules or site.setup:
        yield f"\n{_CHECKED}"
    yield ""
    if site.modules or any(re.match(r"\s*(module|ml)\b", line) for line in site.setup):
        yield "type module &>/dev/null || source /etc/profile # defines `module`"
    for command in _module_commands(site.modules):
        yield f"{command}\nchecked {shlex.quote(f'site.modules: {command}')}"
    yield from _exports(launch, site)
    for command in site.setup:
        yield f"{command}\nchecked {shlex.quote(f'site.setup: {command}')}"


def _module_commands(modules: Sequence[str]) -> Iterator[str]:
    """Yield the commands, in their order; what is no name of a module stands behind `module`."""
    for loads, group in groupby(modules, lambda text: not re.search(r" |^(purge|reset)$", text)):
        if loads:
            yield f"module load {shlex.join(group)}"
        else:
            yield from (f"module {shlex.join(text.split())}" for text in group)


def _exports(launch: LaunchConfig, site: SiteConfig) -> Iterator[str]:
    trusted = {TRUST: os.environ[TRUST]} if TRUST in os.environ else {}
    for name, value in {"OMP_NUM_THREADS": launch.cpus_per_task, **trusted, **site.env}.items():
        if not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII) or "\0" in str(value):
            raise ConfigError(f"site.env.{name}={value!r}: not a variable of the environment")
        yield f"export {name}={shell_word(str(value))}"


def _snapshot(output_dir: str, pythonpath: Sequence[Path]) -> Iterator[str]:
    if not pythonpath:
        return
    if any(":" in str(path) for path in pythonpath):
        raise ConfigError(
            f"output_dir={output_dir}: PYTHONPATH cannot name a path with a colon, so the "
            "code snapshot could not be imported"
        )
    snapshot = shlex.quote(":".join(map(str, pythonpath)))
    yield "\n# Python imports the code of the snapshot, not that of the working directory."
    yield f'export PYTHONPATH={snapshot}"${{PYTHONPATH:+:$PYTHONPATH}}" PYTHONSAFEPATH=1'


def _srun(
    job: JobRequest, folder: Path, pythonpath: Sequence[Path], image: Sequence[str], command: str
) -> Iterator[str]:
    launch, site = job.launch, job.site
    folders = [Path(job.output_dir), folder, *map(Path, job.data), *pythonpath]
    has_gpus = launch.gpus_per_node > 0
    container_arguments, container = in_container(site.container, folders, has_gpus=has_gpus)
    # Not every version of Slurm passes these options of the job on to srun.
    resources = {"cpus-per-task": launch.cpus_per_task, **step_gpu_options(launch, site)}
    arguments = [
        "--kill-on-bad-exit=1",
        # The ranks get the environment of this shell even if sbatch had --export=NONE.
        "--export=ALL",
        *(f"--{name}={value}" for name, value in resources.items()),
        *site.srun,
        *container_arguments,
    ]
    python = [sys.executable] if site.container.runtime is None else [site.container.python]
    if image:
        python = ["bash", f"{folder}/environment.sh", *image, *python]
    packed = launch.pack > 1
    in_steps = command in _IN_STEPS  # the ranks of a function have no checkpoint to go on from
    start = '/bin/sh -c "$start" rank "$run" "$job"' if in_steps else _IGNORE_SIGNALS
    lines = [
        "srun" + ' "$@"' * in_steps + " --exact" * packed + " --unbuffered --open-mode=append",
        *([" ".join(options)] if (options := rank_options(launch)) else []),
        '--output="$run"/logs/%A_%a.rank%t.log',
        shlex.join(arguments),
        *([shell_words(container)] if container else []),
        f'{start} {shlex.join(python)} -u -m hpctrain {command} "$run"',
    ]
    if site.container.runtime is not None and in_steps and not packed:
        yield f'\n# The container has no scontrol.\nexport {REQUEUE_NOTE}="$run"/requeue'
    if GPUS in container:
        yield f"\n{CHOOSE_GPUS}"
    yield from choose_nodes(launch, job.nodes)
    if site.gpu_option == "gpus-per-task":
        yield _SHARED_GPUS
    ranks = " \\\n    ".join(lines)
    if not in_steps:
        yield "\n# At Slurm's SIGTERM the ranks end; this shell must wait for them."
        yield f"trap : TERM\n{ranks}"
        return
    # In a container the decision is made in it, too, as the host may have no Python for it. Its
    # step needs no GPU, so it may overlap with one whose tasks cannot be killed.
    one_task = ["srun", "--overlap", "--nodes=1", "--ntasks=1", *container_arguments]
    words = one_task if container_arguments else []
    words += [*container, *python, "-m", "hpctrain.engine.job.verdict"]
    text, run = steps.TEXT, "run_steps"
    if packed:
        text = f"{text}\n{steps.PACK}\nscript={shlex.quote(str(folder / 'job.sh'))}"
        run = 'run_pack "${runs[@]}"'
    yield _RUN_STEPS.format(ranks=ranks, verdict=shell_words(words), steps=text, run=run)
