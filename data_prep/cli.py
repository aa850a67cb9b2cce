"""The command line. Each command imports the large libraries that it needs by itself.

Exit codes: 0 done (or nothing to do), 1 a bug, which is shown with its traceback, 2 usage, 3 data,
6 storage, 130 Ctrl-C. `HPCTRAIN_DEBUG=1` shows the traceback of all other errors too.
"""

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from typing import Any, NoReturn

from hpctrain.base import gone
from hpctrain.base.errors import DataError, HpctrainError
from hpctrain.base.terminal.terminal import indented

# Each is a module with ARGUMENTS for `add_options`, and `run(args)` or, if it writes a data set,
# `source(args, options)`; `prepare(args)` may change the arguments before. EPILOG explains more.
COMMANDS = {
    "images": ("sources.images", "folders by class, or a list with paths and labels"),
    "text": ("sources.text", "txt, jsonl, Parquet: documents into tokens"),
    "arrays": ("sources.arrays", "npy, npz, HDF5"),
    "table": ("sources.table", "CSV, Parquet: columns as fields"),
    "webdataset": ("sources.webdataset", "tar files of samples"),
    "python": ("sources.python", "FILE.py:NAME, a generator of dicts"),
    "sample": ("sources.sample", "small data sets for first runs; nothing to download"),
    "repack": ("sources.repack", "write a data set again, in other shards, codec or order"),
    "index": ("tools.adopt", "adopt HDF5 files in place: write only index.json"),
    "finalize": ("tools.finalize", "put the parts of a job array together (see --part)"),
    "inspect": ("tools.inspect", "show a data set, or verify it (--verify)"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return the exit code."""
    argv = sys.argv[1:] if argv is None else list(argv)
    try:
        gone.check_command("data_prep", argv)
        args = _parser(argv).parse_args(argv)
        args.command_line = shlex.join(["python", "-m", "data_prep", *argv])
        args.run(args)
        return 0
    except HpctrainError as error:
        if os.environ.get("HPCTRAIN_DEBUG") == "1":
            raise
        print(f"data_prep: {indented(str(error))}", file=sys.stderr)
        return error.exit_code
    except MemoryError as error:
        print(f"data_prep: there is too little memory: {error}".rstrip(": "), file=sys.stderr)
        return DataError.exit_code
    except KeyboardInterrupt:
        print("data_prep: interrupted; the same command goes on", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `… | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _write(command: Any, args: argparse.Namespace) -> None:
    """Write a data set: convert the source that a command makes."""
    from data_prep.options import Options
    from data_prep.writing.convert import convert

    if hasattr(command, "prepare"):
        command.prepare(args)
    options = Options.of(args)
    convert(command.source(args, options), args.out, options)


class _Parser(argparse.ArgumentParser):
    """A parser that reports an error in one line; argparse would print a page of usage first."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"data_prep: {message}; {self.prog} --help lists what there is\n")


class _Command(_Parser):
    """The parser of a command; options may also stand between the files and OUT."""

    _inner = False

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse the arguments; see `argparse`, whose subparsers do not mix options and files."""
        if self._inner:
            return super().parse_known_args(args, namespace)
        self._inner = True
        found, unknown = self.parse_known_intermixed_args(args, namespace)
        self._inner = False
        if unknown:  # the message of the main parser would not name the command
            self.error(f"unrecognized arguments: {shlex.join(unknown)}")
        return found, unknown


def _parser(argv: Sequence[str]) -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m data_prep",
        description="Write a data set as HDF5 shards with an index, or look at one.",
        epilog="A command that is given again does no work twice: it continues where an "
        "interruption has stopped it.",
        formatter_class=partial(argparse.HelpFormatter, indent_increment=0),  # one line a command
    )
    commands = parser.add_subparsers(
        dest="command", required=True, metavar="COMMAND", parser_class=_Command
    )
    chosen = next((word for word in argv if not word.startswith("-")), None)
    for name, (module, summary) in COMMANDS.items():
        command = commands.add_parser(
            name,
            help=summary,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,  # a later option would make a script's abbreviation ambiguous
        )
        if name == chosen:
            from data_prep.options import add_options

            found = import_module(f"data_prep.{module}")
            command.description, command.epilog = found.__doc__, getattr(found, "EPILOG", None)
            command.set_defaults(run=getattr(found, "run", partial(_write, found)))
            add_options(command, found.ARGUMENTS)
    return parser
