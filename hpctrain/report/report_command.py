"""`python -m hpctrain report`: where the time, the GPUs and the energy of runs went."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

from hpctrain.commands import select
from hpctrain.console import Console
from hpctrain.errors import ConfigError
from hpctrain.report.account.facts_json import as_json
from hpctrain.report.account.run_account import read
from hpctrain.report.views import terminal_view


def main(argv: Sequence[str]) -> int:
    """Print the reports of runs; return the exit code.

    Raises:
        ConfigError: A run is unknown, or options do not fit together.
        StorageError: There is no such folder.
    """
    options = _parse(argv)
    paths = select.select(options.dir, options.runs, several=True)
    if not paths:
        raise ConfigError(f"{options.dir}: it has no runs to report on; --dir says where they are")
    accounts = read(paths)
    if options.json:
        print(json.dumps([as_json(account) for account in accounts]))
        return 0
    console = Console(soft_wrap=True)
    for index, account in enumerate(accounts):
        if index:
            console.print()
        console.print(terminal_view.show(account))
    return 0


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m hpctrain report",
        description="Show where the time of runs went, what they cost, and what to change.",
        allow_abbrev=False,
    )
    select.add_arguments(parser, "all runs if none is named")
    return parser.parse_args(argv)
