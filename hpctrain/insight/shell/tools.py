"""What is opened on a node: a shell, the training under a debugger, or a notebook."""

import argparse
import os
import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import zip_longest
from pathlib import Path

from hpctrain.base.errors import ConfigError

LOGIN = "HPCTRAIN_LOGIN"  # who has opened it where, for the line of the tunnel
_WHEN = ("first", "error")  # a rank waits for a debugger
_JUPYTER = ("jupyterlab", "notebook", "jupyter_server")
# The option of a tool, the modules of which it needs one, and the package that has them.
_NEEDS = {
    "debug": ("--debug", ("debugpy",), "'hpctrain[debug]'  (or debugpy)"),
    "notebook": ("--jupyter", _JUPYTER, "'hpctrain[notebook]'  (or jupyterlab)"),
}
# The programs of an environment that is unpacked on the node; its lock stays with the process.
_WITH_PATH = (
    "import os, sys; os.environ['PATH'] = f'{os.path.dirname(sys.executable)}:' + "
    "os.environ['PATH']; os.execvp(sys.argv[1], sys.argv[1:])"
)


@dataclass(frozen=True)
class Tool:
    """One of the three."""

    name: str
    options: Sequence[str] = ()  # of its program on the node

    @property
    def trains(self) -> bool:
        """Whether the ranks of the run are started, each in a task of its own."""
        return self.name == "debug"

    @property
    def pty(self) -> bool:
        """Whether the step has the terminal."""
        return self.name == "shell"

    def words(self, python: Sequence[str], run: Path | None) -> list[str]:
        """Return the command on the node; `python` are the words that start Python there."""
        if self.name == "shell":
            prompt = f"PS1=({run.name if run else 'hpctrain'}) \\h:\\w\\$ "
            before = [*python, "-c", _WITH_PATH] if len(python) > 1 else []
            return [*before, "env", prompt, "bash", "--norc", "-i"]
        given = [str(run)] if self.trains else []
        # Python's own modules that are frozen have no lines, of which debugpy warns.
        quiet = ["-X", "frozen_modules=off"] if self.trains else []
        return [*python, "-u", *quiet, "-m", f"{__package__}.{self.name}", *given, *self.options]


def require(name: str) -> str:
    """Return the module that a tool needs; one that is missing is a ConfigError with the cure."""
    option, modules, package = _NEEDS[name]
    if found := [module for module in modules if find_spec(module)]:
        return found[0]
    lacking = f"{' or '.join(modules)} is not installed here"
    raise ConfigError(f"{option}: {lacking}: pip install {package}")


def spelled(argv: Sequence[str]) -> list[str]:
    """Return the words of a command in which no RUN is taken for the value of --debug."""
    pairs = zip_longest(argv, argv[1:])
    return [f"{a}={_WHEN[0]}" if a == "--debug" and b not in _WHEN else a for a, b in pairs]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that choose another tool than a shell."""
    parser.add_argument(
        "--debug",
        nargs="?",
        const="first",
        choices=_WHEN,
        help="train the run from its last checkpoint, and wait for a debugger (debugpy) at its "
        "first step, or at its error; the line of the tunnel is printed",
    )
    parser.add_argument(
        "--rank",
        metavar="N|all",
        help="the rank that waits (default: 0 at the first step, all at an error)",
    )
    parser.add_argument(
        "--jupyter", action="store_true", help="a notebook on the node, as one rank"
    )


def chosen(options: argparse.Namespace) -> Tool:
    """Return what the options choose."""
    if options.debug and options.jupyter:
        raise ConfigError("--debug and --jupyter: give one of them")
    if options.rank is not None and not options.debug:
        raise ConfigError(f"--rank {options.rank}: it says which rank waits with --debug")
    if options.debug:
        ranks = options.rank or ("0" if options.debug == "first" else "all")
        if not re.fullmatch(r"all|\d{1,7}", ranks):
            raise ConfigError(f"--rank {ranks}: the number of a rank, or all")
        return Tool("debug", [options.debug, ranks])
    return Tool("notebook" if options.jupyter else "shell")


def tunnel(port: int) -> str:
    """Return the command that brings a port of this node to a machine of one's own.

    The port is open on the node's loopback alone: a debugger asks nobody for a password.
    """
    through, node = os.environ.get(LOGIN, ""), socket.gethostname()
    user = through.partition("@")[0]
    jump, place = (f"-J {through} ", f"{user}@{node}") if through else ("", node)
    return f"ssh {jump}-L {port}:localhost:{port} {place}"
