"""The command line. Everything heavy is imported by the command that needs it.

Exit codes: 0 done (or nothing to do), 2 usage, 3 data, 6 storage, 130 Ctrl-C; 1 is a bug, with
its traceback. `HPCTRAIN_DEBUG=1` shows the traceback of the others too.
"""

import argparse
import os
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from data_prep.options import Options
from hpctrain.errors import ConfigError, HpctrainError

UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
SHARD_SIZE = "256MiB"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return the exit code."""
    argv = sys.argv[1:] if argv is None else list(argv)
    args = _parser().parse_args(argv)
    args.command_line = shlex.join(["python", "-m", "data_prep", *argv])
    try:
        run = {"sample": _sample, "arrays": _arrays, "inspect": _inspect}[args.command]
        run(args)
    except HpctrainError as error:
        if os.environ.get("HPCTRAIN_DEBUG") == "1":
            raise
        print(f"data_prep: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("data_prep: interrupted; run the same command again", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `… | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return 0


def parse_size(text: str) -> int:
    """Return the bytes of a size such as "64MB" or "1.5GiB".

    Raises:
        ConfigError: It is not a size with a unit.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]+)", text.strip())
    size = int(float(match[1]) * UNITS.get(match[2], 0)) if match else 0
    if size < 1:
        raise ConfigError(
            f"--shard-size {text!r}: give the bytes of data in a shard with a unit, such as 64MB "
            f"({', '.join(UNITS)})"
        )
    return size


def _sample(args: argparse.Namespace) -> None:
    from data_prep import sample
    from data_prep.convert import convert

    source = {"digits": sample.digits, "stdlib": sample.stdlib}[args.name]()
    convert(source, args.out, _options(args))


def _arrays(args: argparse.Namespace) -> None:
    from data_prep.arrays import arrays
    from data_prep.convert import convert
    from data_prep.split import Split

    convert(arrays(args.files, args.field, Split.parse(args.split)), args.out, _options(args))


def _inspect(args: argparse.Namespace) -> None:
    from data_prep.show import show

    show(args.out, as_json=args.json)


def _options(args: argparse.Namespace) -> Options:
    return Options(parse_size(args.shard_size), args.overwrite, args.quiet, args.command_line)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m data_prep",
        description="Write a data set as HDF5 shards with an index.",
        epilog="The same command twice does the work once; an interrupted one is run again.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    writing = argparse.ArgumentParser(add_help=False)
    writing.add_argument(
        "--shard-size",
        default=SHARD_SIZE,
        metavar="SIZE",
        help="data in one shard, such as 64MB or 1GiB (default: %(default)s)",
    )
    writing.add_argument("--overwrite", action="store_true", help="replace another data set in OUT")
    writing.add_argument("--quiet", action="store_true", help="print errors only")

    sample = commands.add_parser(
        "sample",
        parents=[writing],
        help="real data that comes with Python packages",
        description="digits: 1,797 handwritten digits of scikit-learn (image, label). stdlib: the "
        "source of Python's standard library, one document a file (text, path).",
    )
    sample.add_argument("name", choices=("digits", "stdlib"))
    sample.add_argument("out", type=Path, metavar="OUT", help="folder to write")

    arrays = commands.add_parser(
        "arrays",
        parents=[writing],
        help="NumPy files (.npy, .npz)",
        description="Each .npy file is a field named as the file, each .npz gives its keys; the "
        "first axis is the sample.",
        epilog="Options go before or after FILE… OUT, not between them.",
    )
    arrays.add_argument("files", nargs="*", type=Path, metavar="FILE", help=".npy or .npz")
    arrays.add_argument("out", type=Path, metavar="OUT", help="folder to write")
    arrays.add_argument(
        "--field",
        action="append",
        default=[],
        metavar="NAME=FILE.npy",
        help="a .npy file as the field NAME (may be repeated)",
    )
    arrays.add_argument(
        "--split",
        default="train=1",
        metavar="NAME=FRACTION,…",
        help="such as train=0.9,val=0.1, by a hash of the sample's number (default: all train)",
    )

    inspect = commands.add_parser("inspect", help="what a data set holds")
    inspect.add_argument("out", type=Path, metavar="OUT", help="folder of the data set")
    inspect.add_argument("--json", action="store_true", help="as JSON")
    return parser
