"""`python -m hpctrain shell [RUN]`: a shell, a debugger or a notebook where a run runs.

    a run whose job runs ── srun --jobid --overlap ── a step beside its ranks
    any other, or KEY=VALUE ── salloc ── srun ── an allocation of its own

The step has what the ranks of the run have: the lines of the site, the container, the copy of the
code. Its environment travels in a variable, as a command line could be read by everybody.
"""

import argparse
import getpass
import os
import secrets
import shlex
import shutil
import socket
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from hpctrain.base import offered
from hpctrain.base.errors import ConfigError, LaunchError
from hpctrain.base.terminal.terminal import printable
from hpctrain.cluster.slurm import queue, sbatch
from hpctrain.cluster.slurm.container import CHOOSE_GPUS, GPUS, in_container, shell_words
from hpctrain.cluster.slurm.job_environment import clean_environment
from hpctrain.cluster.slurm.sbatch_options import sbatch_options, step_gpu_options
from hpctrain.cluster.slurm.script import lines_of_ranks, sbatch_script
from hpctrain.commands.facts import Facts
from hpctrain.commands.select import add_dir, latest_run
from hpctrain.commands.state import UNDER_WAY, states_of
from hpctrain.config.composing.compose_sweep import composed
from hpctrain.config.frozen import executed, load
from hpctrain.config.job_request import JobRequest
from hpctrain.config.schema import Config
from hpctrain.insight.doctor.command import settings
from hpctrain.insight.shell import tools
from hpctrain.insight.shell.held import run_held
from hpctrain.runs import trust
from hpctrain.runs.code.snapshot import Snapshot
from hpctrain.runs.freeze import check, freeze
from hpctrain.runs.run_dir import RunDir

_LONGEST_MIN = 60  # of an allocation, where launch.time_min is not given
_NOT_OF_SALLOC = {"requeue", "signal", "export", "export-file", "propagate", "input", "wait"}
_LINES = "HPCTRAIN_SHELL"
# The variable is read, and then it is gone: what is started here has its own environment.
_BEGIN = f'lines=${_LINES}; unset {_LINES}; eval "$lines"'
_SETUP_FIRST = 'eval "$lines"; exec "$@"'


class _Place(NamedTuple):
    """Where the step is, and what it belongs to."""

    config: Config
    run: Path | None  # None: a shell without a run
    job: str  # of the run, which runs; "": an allocation of its own
    pythonpath: Sequence[Path]


def main(argv: list[str]) -> int:
    """Open it; return the exit code of what has run there."""
    options = _parser().parse_intermixed_args(tools.spelled(argv))
    overrides = [text for text in options.words if "=" in text and not os.path.exists(text)]
    names = [text for text in options.words if text not in overrides]
    if len(names) > 1:
        raise ConfigError(f"{' '.join(names)}: shell takes one RUN")
    tool = tools.chosen(options)
    if not shutil.which("salloc" if not names else "srun"):
        raise LaunchError(
            "shell asks Slurm for a node, but srun and salloc are not on the PATH: call it on a "
            "login node. Without a cluster this machine is the node: open a shell here"
        )
    if tool.pty and not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise ConfigError(
            "shell needs a terminal: standard input and output are none; a program of its own "
            "goes to a node with `srun`"
        )
    if tool.trains and not names:
        names = [str(_frozen(overrides, options.config_dir))]
        overrides = [text for text in overrides if text.startswith(("launch.", "site."))]
    if names:
        place = _of_run(latest_run(options.dir, names[0], "shell"), overrides, tool)
    else:
        config, _ = settings(overrides, options.config_dir)
        _bound(config, overrides)
        place = _Place(config, None, "", ())
    if place.config.site.container.runtime is None and not tool.pty:  # else it is inside
        tools.require(tool.name)
    return _open(place, tool)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m hpctrain shell",
        description="Open a shell on a node, with the environment, the container and the copy of "
        "the code of a run: beside its ranks if its job runs, else in an allocation of its own, "
        f"of at most {_LONGEST_MIN} minutes if launch.time_min is not given. Without RUN, "
        "KEY=VALUE says what is asked for, or with --debug what is trained. Leaving the shell, "
        "Ctrl-C and closing the terminal give the allocation back.",
    )
    parser.add_argument(
        "words",
        nargs="*",
        metavar="RUN|KEY=VALUE",
        help="a run, its directory or the start of its name; keys, of which a run takes launch.* "
        "and site.*",
    )
    add_dir(parser)
    parser.add_argument("--config-dir", metavar="DIR", help="a folder with more configs")
    tools.add_arguments(parser)
    trust.add_argument(parser)
    return parser


def _frozen(overrides: list[str], config_dir: str | None) -> Path:
    """Write the run directory of a training, unless its run is under way; return it."""
    with composed(overrides, config_dir) as call:
        if len(call.runs) != 1:
            raise ConfigError(f"{' '.join(overrides)}: {len(call.runs)} runs; --debug takes one")
        config = call.composer.typed(call.runs[0])
    run = check(config)
    if not run.path.exists() or states_of([run.path])[0][1].name not in UNDER_WAY:
        freeze(config, run, overrides, config_dir or "")
    return run.path


def _of_run(path: Path, overrides: list[str], tool: tools.Tool) -> _Place:
    for text in overrides:
        if text.partition(".")[0] not in ("launch", "site"):
            raise ConfigError(f"{text}: a run has its config; shell takes launch.* and site.*")
    ((facts, state),) = states_of([path])
    run = RunDir.open(path)
    config = load(run.config_file, overrides)
    trust.check(path, executed(config), run.code_copy)
    copy = Snapshot.load(run.code_copy) if run.code_copy else None
    job = _job_id(facts) if state.name == "running" else ""
    if tool.trains and state.name in (*UNDER_WAY, "finished"):
        raise ConfigError(
            f"{path.name} is {state.name}: --debug goes on with a run that is not finished and "
            "that nobody trains; `cancel` it first, or change a value (seed=1) for another run"
        )
    if job and overrides:
        raise ConfigError(f"{overrides[0]}: {path.name} runs, and its job has what it has")
    given = [text.partition("=")[0] for text in overrides]
    _bound(config, overrides)
    config.launch.nodes = JobRequest.of(config).nodes[0]
    if not (tool.trains or job or "launch.nodes" in given):
        config.launch.nodes = 1
    return _Place(config, path, job, copy.pythonpath if copy else ())


def _bound(config: Config, overrides: Sequence[str]) -> None:
    """Bound the time of an allocation, unless it is given."""
    if not any(text.startswith("launch.time_min=") for text in overrides):
        config.launch.time_min = min(_LONGEST_MIN, config.launch.time_min)


def _job_id(facts: Facts) -> str:
    """Return the number of the job of a run that runs; a task of an array has one of its own."""
    if facts.job is None:
        where = facts.attempt.host or "another host"
        raise ConfigError(f"{facts.name} runs on {where}, in no job: open a shell there by ssh")
    told = queue.ask("squeue", "--noheader", f"--jobs={facts.job.id}", "--format=%A")
    return (told or facts.job.id).strip()


def _open(place: _Place, tool: tools.Tool) -> int:
    config, run = place.config, place.run
    launch = config.launch = replace(config.launch, spares=0, pack=1)
    request = JobRequest.of(config)
    name = f"{tool.name}-{run.name if run else config.name}-{secrets.token_hex(3)}"
    srun = [*_srun(request, place, tool)]
    pyxis = config.site.container.runtime == "pyxis"
    # The lines of the site are for a host, and the whole step is in the container with pyxis.
    before = ["bash", "-c", f"{_BEGIN}; {_SETUP_FIRST}", "bash"] if pyxis else []
    command = [*before, *srun]
    if not place.job:
        script = sbatch_script(request, Path(config.output_dir) / "shell", 1, command="call")
        start = sbatch.expected_start(script, request)
        print(printable(f"{launch.nodes} node(s) for {launch.time_min} minutes: {start}"))
        command = ["salloc", *_salloc(request, name), *command]
    env = clean_environment()
    env[_LINES] = "\n".join(_lines(request, place))
    env[tools.LOGIN] = f"{getpass.getuser()}@{socket.getfqdn()}"
    return run_held(command, env, "" if place.job else name)


def _python(request: JobRequest, place: _Place) -> list[str]:
    """Return the Python of the ranks; an environment that travels is packed if it is new."""
    if place.config.site.container.runtime is not None:
        return [place.config.site.container.python]
    if request.launch.environment == "shared":
        return [sys.executable]
    environment = offered.environment
    image = environment.image(request.output_dir)
    code = environment.code_folder(request.output_dir, place.pythonpath)
    environment.write(image, code)
    return ["bash", str(environment.SHELL), str(image), str(code or ""), sys.executable]


def _salloc(request: JobRequest, name: str) -> Iterator[str]:
    """Yield the options of an allocation like that of the run."""
    options = sbatch_options(name, request.launch, request.site, request.nodes, 0)
    for option, value in options.items():
        if option not in _NOT_OF_SALLOC:
            yield f"--{option}" + ("" if value is True else f"={value}")


def _lines(request: JobRequest, place: _Place) -> Iterator[str]:
    """Yield the lines of the shell script that make the environment of the ranks."""
    yield from lines_of_ranks(request, place.pythonpath)
    if place.config.site.container.runtime is None:
        yield f'export PATH={shlex.quote(str(Path(sys.executable).parent))}:"$PATH"'
    if place.run is not None:
        yield f"export run={shlex.quote(str(place.run))}"


def _srun(request: JobRequest, place: _Place, tool: tools.Tool) -> Iterator[str]:
    """Yield the words of the step."""
    launch, site = request.launch, request.site
    folders = [Path(request.output_dir), *map(Path, request.data), *place.pythonpath]
    has_gpus = launch.gpus_per_node > 0
    options, container = in_container(site.container, filter(str, folders), has_gpus=has_gpus)
    yield from ("srun", "--export=ALL", "--overlap")
    if place.job:
        yield f"--jobid={place.job}"
    nodes, tasks, cpus = 1, 1, launch.tasks_per_node * launch.cpus_per_task
    if tool.trains:
        nodes, tasks, cpus = request.nodes[0], launch.tasks_per_node, launch.cpus_per_task
    yield from (f"--nodes={nodes}", f"--ntasks={nodes * tasks}", f"--ntasks-per-node={tasks}")
    yield f"--cpus-per-task={cpus}"
    yield from (f"--{name}={value}" for name, value in step_gpu_options(launch, site).items())
    yield from ("--pty",) if tool.pty else ("--quit-on-interrupt", "--kill-on-bad-exit=1")
    yield from (*site.srun, *options)
    words = tool.words(_python(request, place), place.run)
    if site.container.runtime == "pyxis":
        yield from words
        return
    choose = f"{CHOOSE_GPUS}\n" if GPUS in container else ""
    inner = shell_words([*container, *words])
    yield from ("bash", "-c", f"{_BEGIN}\n{choose}exec {inner}")
