"""Put the parts that the tasks of a job array have written together (see --part).

The last task does this by itself. If a part is missing, the message has the command that writes
it. The command may be given again at any time.
"""

import argparse

ARGUMENTS = """
out=OUT : path
    OUT of all parts
"""


def run(args: argparse.Namespace) -> None:
    """Run the command."""
    from data_prep.writing.finalize import finalize_parts, summary

    print(f"{args.out}: {summary(finalize_parts(args.out))}")
