"""Put the parts that the tasks of a job array have written together (see --part)."""

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
    from data_prep.finalize import finalize, summary
    from data_prep.job import Job

    with Job(args.out, None) as job:
        index = finalize(job)
    print(f"{args.out}: {summary(index)}")
