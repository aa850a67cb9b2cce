"""The command line: train here, submit a sweep, or run one of the commands.

A command is the first argument (`hpctrain env`). Without one, Hydra reads all the arguments
(`experiment=digits optimizer.lr=1`). Heavy imports are inside the functions, so that no command on
a login node waits for torch or mlflow.
"""

import difflib
import errno
import io
import os
import re
import select
import sys
import textwrap
import traceback
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from hpctrain import __version__, gone
from hpctrain.disk import umask
from hpctrain.errors import ConfigError, HpctrainError, StorageError
from hpctrain.faults import early_signals
from hpctrain.rendezvous.leaving import exit_at_once_if_group_is_open
from hpctrain.secrets import mask
from hpctrain.terminal import exact, guard, harmless, indented

HELP = """\
hpctrain: from a config to finished, trustworthy training runs on Slurm

  python -m hpctrain experiment=digits           train here in this process
  torchrun --nproc-per-node 2 -m hpctrain experiment=digits     with 2 ranks
  python -m hpctrain -m experiment=digits optimizer.lr=1e-3,1e-2
                                                 submit one job per value
  sbatch slurm/train.sbatch experiment=digits    submit one job, no submitit

If a run was stopped (Ctrl-C, preemption, kill -9), the same command resumes it
from its last checkpoint.

Commands
  env [--json]         the ranks, hosts and Slurm variables of this process
  freeze OVERRIDES     check a config, write its run directory, print its path
  run RUN_DIR          train a frozen run directory; --until-step K pauses it
  sync [RUN_DIR...]    upload to MLflow what it does not have yet
  status [RUN|SWEEP]   show the states of the runs; --watch repeats it
  top [RUN]            live: what the nodes and GPUs of a run do; --once --json
  logs RUN             show the output of a run, or why it failed; -f follows it
  cancel RUN|SWEEP     stop runs for good; --save: after a checkpoint
  resume [RUN|SWEEP]   start runs again that failed or were preempted
  branch RUN           make a run that goes on from a checkpoint of another one
  evaluate RUN         the metrics of a checkpoint, on any split and data set
  predict RUN DATA OUT write what the model says of each sample as HDF5 shards
  export RUN OUT       write weights as safetensors; --merge adds its adapters
  checkpoints [RUN]    list the checkpoints of runs; --verify reads their files
  gc                   list what can be deleted; only --delete deletes it
  report [RUN|SWEEP]   where the time and GPU-hours went, and what to change
  compare RUN RUN      show what differs, and at which step two runs part
  generate RUN PROMPT  let a trained language model continue a text
  bench OVERRIDES      measure loader, steps and links; --against FILE compares
  doctor               check versions, Slurm, storage; --nodes N: in a job
  plan OVERRIDES       tell memory, time and cost of a run before it is queued
  plot RUN...          draw curves in the terminal, or --out FILE.png|.html
  keys [SECTION|WORD]  list the sections of the config; show or search its keys
  metrics [GROUP|NAME] print unit and meaning of everything that a run measures
  from-deepspeed FILE  translate a DeepSpeed config for conf/experiment
  from-accelerate FILE translate a config of Hugging Face Accelerate likewise

Choices (NAME=CHOICE)
{groups}
Values (KEY=VALUE)
{keys}
  python -m hpctrain keys                          lists the sections
  python -m hpctrain keys train                    shows the keys of one
  python -m hpctrain experiment=digits --cfg job   prints the values of a config

--config-dir DIR adds a folder of configs; --hydra-help explains Hydra's own
options; --version.

Exit codes: 0 finished or paused, 1 the training raised an exception, 2 config,
3 data, 4 scheduler, 5 ranks or ports, 6 run directory, 7 tracking, 8 a number
is not finite, 9 a node fails its checks, 130 saved and stopped by Ctrl-C, 143
saved and stopped by a signal. HPCTRAIN_DEBUG=1 shows the tracebacks of errors.
"""


# Commands whose module has a `main` that takes the arguments and returns the exit code.
COMMANDS = {
    "env": "hpctrain.rendezvous.report",
    "status": "hpctrain.commands.status",
    "logs": "hpctrain.commands.logs",
    "cancel": "hpctrain.commands.cancel",
    "resume": "hpctrain.commands.resume",
    "branch": "hpctrain.trained.commands.branch",
    "evaluate": "hpctrain.trained.commands.evaluate",
    "predict": "hpctrain.trained.commands.predict",
    "export": "hpctrain.trained.commands.export",
    "checkpoints": "hpctrain.commands.checkpoints",
    "gc": "hpctrain.commands.gc",
    "report": "hpctrain.report.report_command",
    "compare": "hpctrain.report.compare_command",
    "generate": "hpctrain.trained.commands.generate",
    "bench": "hpctrain.bench.bench",
    "doctor": "hpctrain.doctor.command",
    "plan": "hpctrain.plan.plan_command",
    "top": "hpctrain.report.live.live",
    "keys": "hpctrain.config.keys",
    "plot": "hpctrain.report.plot_command",
    "metrics": "hpctrain.config.metric_command",
    "from-deepspeed": "hpctrain.config.translate.deepspeed",
    "from-accelerate": "hpctrain.config.translate.accelerate",
}


# What people type for a command.
_OTHER_WORDS = {
    word: command
    for command, words in {
        "cancel": "stop kill abort end",
        "gc (a run is deleted with its directory)": "delete remove rm clean",
        "status": "list ls ps runs show",
        "resume": "continue restart requeue",
        "evaluate": "eval test validate",
        "top": "watch monitor",
        "logs": "log tail",
        "-m KEY=VALUE": "submit launch sweep",
        "KEY=VALUE alone": "train fit",
    }.items()
    for word in words.split()
}


def main() -> None:
    """Run the command line and exit with its code."""
    debug = bool(os.environ.get("HPCTRAIN_DEBUG"))
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # print letters that the locale lacks as escapes
            stream.reconfigure(errors="backslashreplace")
    code = 1
    try:
        # The ranks of a local job ignore Ctrl-C until they can save (hpctrain.launch.local_runs).
        if sys.argv[1:2] not in (["run"], ["work"], ["call"]):
            early_signals.heed_ctrl_c()
        os.umask(umask())
        code = _dispatch(sys.argv[1:])
    except HpctrainError as error:
        if debug:
            _print_traceback()
        print(f"error: {indented(mask(str(error)))}", file=sys.stderr)
        code = error.exit_code
    except KeyboardInterrupt:
        print("interrupted: the same command goes on where it stopped", file=sys.stderr)
        code = 130
    except SystemExit:
        raise
    except BaseException as error:  # torch's CheckpointException is no Exception
        # submitit and Hydra would hide the exception: the log must show it and the job must fail.
        if _is_full(error):
            code = _print_full(error)
        elif not (isinstance(error, BrokenPipeError) and _nobody_reads()):
            _print_traceback()
    try:
        sys.stdout.flush()
    except OSError as error:
        # Python flushes once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = code or (_print_full(error) if _is_full(error) else 1)
    sys.stderr.flush()
    exit_at_once_if_group_is_open(code)
    sys.exit(code)


def _is_full(error: BaseException) -> bool:
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


def _print_full(error: Any) -> int:
    where = error.filename or "standard output"
    print(f"error: {where}: cannot be written ({error.strerror})", file=sys.stderr)
    return StorageError.exit_code


def _nobody_reads() -> bool:
    """Return whether standard output is a closed pipe, as after `| head`."""
    poll = select.poll()
    poll.register(sys.stdout, 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def _dispatch(argv: list[str]) -> int:
    ranks: dict[str, Callable[[list[str]], int]] = {
        "run": _run,
        "work": partial(_command, "hpctrain.job.worker"),  # a rank of a worker of a search
        "call": partial(_command, "hpctrain.job.call"),  # a rank of hpctrain.submit_function
    }
    commands: dict[str, Callable[[list[str]], int]] = {
        "freeze": _freeze,
        **ranks,
        "sync": _sync,
        **{name: partial(_command, module) for name, module in COMMANDS.items()},
    }
    if "LOCAL_RANK" in os.environ:  # torch.distributed.launch says it on the command line, too
        argv = [text for text in argv if not re.fullmatch(r"--local[-_]rank=\d+", text)]
    first = argv[0] if argv else "--help"
    without_help = first not in commands or first in ("freeze", *ranks)
    if {"--help", "-h"} & {first, *argv} and without_help:
        return _help()
    if "--version" in argv and first not in commands:  # Hydra would print its own
        print(f"hpctrain {__version__}")
        return 0
    if first in ranks:
        _begin_rank(first)
    elif first in commands:
        # A training prints what the user's own code prints; its log lines are made harmless.
        guard()
    if not first.startswith("-") and "=" not in first:
        gone.check_command("hpctrain", argv)
    if first in commands:
        return commands[first](argv[1:])
    if not first.startswith(("-", "+", "~")) and "=" not in first:
        near = difflib.get_close_matches(first, commands, n=1)
        meant = _OTHER_WORDS.get(first) or "".join(near)
        hint = f"did you mean {meant}? " if meant else ""
        raise ConfigError(
            f"{first}: no such command; {hint}commands are {', '.join(commands)}, "
            "and a training takes KEY=VALUE arguments (--help shows both)"
        )
    return _train(argv)


def _help() -> int:
    from hpctrain.config.composing.choices import as_typed, groups, sections
    from hpctrain.yaml_file import conf_dir

    listed = [f"{as_typed(n):<12} {', '.join(found)}" for n, found in groups(conf_dir()).items()]
    columns = ["\n".join(map(_folded, lines)) for lines in (listed, sections())]
    print(HELP.format(groups=columns[0] + "\n", keys=columns[1]), end="")
    return 0


def _folded(line: str) -> str:
    """Return a name and its words in 80 columns, indented."""
    return textwrap.fill(
        line, 79, initial_indent="  ", subsequent_indent=15 * " ", break_on_hyphens=False
    )


def _sync(argv: list[str]) -> int:
    from hpctrain.runs.state.state import ended_for_good
    from hpctrain.tracking.sync import main as sync

    return sync(argv, ended_for_good)


def _command(module: str, argv: list[str]) -> int:
    code: int = import_module(module).main(argv)
    return code


def _freeze(argv: list[str]) -> int:
    from hpctrain.config.composing.compose import compose, words
    from hpctrain.runs.freeze import check, freeze

    if {"-m", "--multirun"} & {*argv}:
        raise ConfigError("freeze -m: freeze takes one run; -m alone freezes and submits several")
    config = compose(argv)
    if config is not None:
        run = check(config)
        freeze(config, run, *words(argv))
        print(run.path, file=exact())
    return 0


def _begin_rank(command: str) -> None:
    if command != "call":  # a function of a user hears its signals itself
        early_signals.note()
    from hpctrain.slurm.job_environment import take_kept_gpus

    take_kept_gpus()


def _run(argv: list[str]) -> int:
    from hpctrain.job.here import train_frozen
    from hpctrain.runs import trust

    if len(argv) == 3 and argv[0] == "--trust":
        trust.accept(argv[1])
        argv = argv[2:]
    until = None
    if len(argv) == 3 and argv[1] == "--until-step":
        until = int(argv.pop()) if re.fullmatch(r"0*[1-9]\d{0,14}", argv[2], re.ASCII) else 0
        argv = argv[:1]
    if len(argv) != 1 or argv[0].startswith("-") or until == 0:
        raise ConfigError(
            "run takes one run directory: python -m hpctrain run [--trust OWNER] RUN_DIR "
            "[--until-step STEP], with a global step of at least 1"
        )
    return train_frozen(Path(argv[0]), until)


def _train(argv: list[str]) -> int:
    """Compose, freeze and train here, or let the launcher submit (`-m`)."""
    from hpctrain.config.composing.compose import compose
    from hpctrain.job.here import train_here

    config = compose(argv)
    if config is None:
        return 0
    if config.launch.dry_run:
        raise ConfigError("launch.dry_run=true shows what -m would submit: add -m")
    return train_here(config, argv)[1]


def _print_traceback() -> None:
    print(harmless(mask(traceback.format_exc())), end="", file=sys.stderr)
