"""Put the parts that the tasks of a job array have written together (see --part).

The last task does this by itself. What is missing is named with its command; twice does no harm.
"""

import argparse
from pathlib import Path


def arguments(parser: argparse.ArgumentParser) -> None:
    """Of the command line."""
    parser.add_argument("out", type=Path, metavar="OUT", help="the OUT of all parts")


def run(args: argparse.Namespace) -> None:
    """Do it.

    Raises:
        DataError: A part is missing.
        StorageError: The folder cannot be written, or a part is being written.
    """
    from data_prep.finalize import finalize_parts, summary

    print(f"{args.out}: {summary(finalize_parts(args.out))}")
