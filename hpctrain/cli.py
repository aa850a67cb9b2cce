"""The command line: train here, submit a sweep, or run one of the commands.

A command is the first argument (`hpctrain status`). Without one, Hydra reads all the arguments
(`experiment=digits optimizer.lr=1`). Heavy imports are inside the functions, so that no command on
a login node waits for torch or mlflow.
"""

import difflib
import errno
import io
import logging
import os
import re
import select
import sys
import traceback
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from hpctrain.base.errors import ConfigError, HpctrainError, StorageError
from hpctrain.base.files.disk import umask
from hpctrain.base.secrets import mask
from hpctrain.base.terminal.terminal import exact, guard, harmless, indented
from hpctrain.base.version import __version__
from hpctrain.cluster.ranks.leaving import exit_at_once_if_group_is_open
from hpctrain.engine.faults import early_signals

log = logging.getLogger(__name__)

# Commands whose module has a `main` that takes the arguments and returns the exit code.
COMMANDS = {
    "status": "hpctrain.commands.status",
    "logs": "hpctrain.commands.logs",
    "cancel": "hpctrain.commands.cancel",
    "resume": "hpctrain.commands.resume",
    "evaluate": "hpctrain.results.commands.evaluate",
    "predict": "hpctrain.results.commands.predict",
    "export": "hpctrain.results.commands.export",
    "report": "hpctrain.insight.report.report_command",
    "plan": "hpctrain.insight.plan.plan_command",
    "doctor": "hpctrain.insight.doctor.command",
    "bench": "hpctrain.insight.bench.bench",
    "gc": "hpctrain.commands.gc",
    "new": "hpctrain.insight.project.new",
    "shell": "hpctrain.insight.shell.shell",
    "init-site": "hpctrain.insight.site.init_site",
    "cluster": "hpctrain.testing.command",
}
# An option that makes another command of it, wherever it stands: the module gets the others.
FORMS = {
    "status": {"--live": "hpctrain.insight.report.live", "--upload": "hpctrain.commands.sync"},
    "resume": {"--branch": "hpctrain.results.commands.branch"},
    "predict": {"--prompt": "hpctrain.results.commands.generate"},
    "report": {"--plot": "hpctrain.insight.report.plot_command"},
    "doctor": {"--env": "hpctrain.insight.doctor.environment"},
}
# Ranks of a job, which ignore Ctrl-C until they can save (hpctrain.launch.sweeps.wait).
_RANKS = ("run", "work", "call")
_OTHERS = ("freeze", *_RANKS)


def main() -> None:
    """Run the command line and exit with its code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # print letters that the locale lacks as escapes
            stream.reconfigure(errors="backslashreplace")
    try:
        if not {*sys.argv[1:2]} & {*_RANKS}:
            early_signals.heed_ctrl_c()
        os.umask(umask())
        code = _dispatch(sys.argv[1:])
    except SystemExit:
        raise
    except BaseException as error:  # torch's CheckpointException is no Exception
        code = _print_error(error)
    try:
        sys.stdout.flush()
    except OSError as error:
        # Python flushes once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = code or (_print_full(error) if _is_full(error) else 1)
    sys.stderr.flush()
    exit_at_once_if_group_is_open(code)
    sys.exit(code)


def _print_error(error: BaseException) -> int:
    """Tell what has ended the command; return its exit code."""
    if isinstance(error, HpctrainError):
        if os.environ.get("HPCTRAIN_DEBUG"):
            _print_traceback()
        print(f"error: {indented(mask(str(error)))}", file=sys.stderr)
        return error.exit_code
    if isinstance(error, KeyboardInterrupt):
        print("interrupted: the same command goes on where it stopped", file=sys.stderr)
        return 130
    # submitit and Hydra would hide the exception: the log must show it and the job must fail.
    if _is_full(error):
        return _print_full(error)
    if not (isinstance(error, BrokenPipeError) and _nobody_reads()):
        _print_traceback()
    return 1


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
    if "LOCAL_RANK" in os.environ:  # torch.distributed.launch says it on the command line, too
        argv = [text for text in argv if not re.fullmatch(r"--local[-_]rank=\d+", text)]
    first = argv[0] if argv else "--help"
    if {"--help", "-h"} & {first, *argv} and first not in COMMANDS:
        from hpctrain.insight.reference.help import show

        guard()
        return show(argv[1:] if first in ("--help", "-h") else [])
    if "--version" in argv and first not in (*COMMANDS, *_OTHERS):  # Hydra would print its own
        print(f"hpctrain {__version__}")
        return 0
    if first.startswith(("-", "+", "~")) or "=" in first:
        return _train(argv)
    return _call(first, argv)


def _call(first: str, argv: list[str]) -> int:
    """Run the command of this name, or say that there is none."""
    from hpctrain.base import gone

    commands: dict[str, Callable[[list[str]], int]] = {
        **{name: partial(_command, name) for name in COMMANDS},
        "freeze": _freeze,
        "run": _run,
        "work": partial(_module, "hpctrain.search.worker"),  # a rank of a worker of a search
        "call": partial(_module, "hpctrain.engine.job.call"),  # a rank of hpctrain.submit_function
    }
    if first in _RANKS:
        if first != "call":  # a function of a user hears its signals itself
            early_signals.note()  # before anything is imported from a busy file system
        from hpctrain.cluster.slurm.job_environment import take_kept_gpus

        take_kept_gpus()
    elif first in commands:
        # A training prints what the user's own code prints; its log lines are made harmless.
        guard()
    gone.check_command("hpctrain", argv)
    if first in commands:
        return commands[first](argv[1:])
    if (found := _of_others(first)) is not None:
        guard()
        return int(found(argv[1:]) or 0)
    meant = "".join(difflib.get_close_matches(first, commands, n=1))
    hint = f"did you mean {meant}? " if meant else ""
    raise ConfigError(
        f"{first}: no such command; {hint}commands are {', '.join(commands)}, "
        "and a training takes KEY=VALUE arguments (--help shows both)"
    )


def _of_others(name: str) -> Any:
    """Return the command that another package brings by its entry points; None if nobody does.

    One that cannot be imported is told and left out.
    """
    from importlib.metadata import entry_points

    for entry in entry_points(group="hpctrain.commands", name=name):
        try:
            return entry.load()
        except Exception as error:
            log.warning("hpctrain.commands: %s (%s) is left out: %s", name, entry.value, error)
    return None


def _command(name: str, argv: list[str]) -> int:
    """Run a command in the form that its options choose."""
    forms = FORMS.get(name, {})
    form = next((word for word in argv if word in forms), None)
    if form is None:
        try:
            return _module(COMMANDS[name], argv)
        finally:
            if forms and {"-h", "--help"} & {*argv}:
                from hpctrain.insight.reference.help import ALL

                print("\nother forms (each with --help):")
                print(*re.findall(rf"^  {name} --?.*|^  {name} RUN --.*", ALL, re.M), sep="\n")
    return _module(forms[form], [word for word in argv if word != form])


def _module(module: str, argv: list[str]) -> int:
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


def _run(argv: list[str]) -> int:
    from hpctrain.engine.job.here import train_frozen
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
    from hpctrain.base.terminal.console import AS_JSON
    from hpctrain.config.composing.compose import compose
    from hpctrain.engine.job.here import train_here

    as_json = "--json" in argv
    argv = [text for text in argv if text != "--json"]
    if as_json and not {"-m", "--multirun"} & {*argv}:
        raise ConfigError("--json is of -m, and of the commands; a training here prints its log")
    before = AS_JSON.set(as_json)
    try:
        config = compose(argv)
    finally:
        AS_JSON.reset(before)
    if config is None:
        return 0
    if config.launch.dry_run:
        raise ConfigError("launch.dry_run=true shows what -m would submit: add -m")
    return train_here(config, argv)[1]


def _print_traceback() -> None:
    print(harmless(mask(traceback.format_exc())), end="", file=sys.stderr)
