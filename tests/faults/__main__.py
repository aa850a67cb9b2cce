"""`make faults`: the fault suite, event by event, then random kills. Each row comes at once."""

import argparse
import random
import re
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

from hpctrain.testing.fixtures import running
from tests.conftest import run_module
from tests.faults import cluster_events
from tests.faults.suite import EVENTS, HEAD, KILLS, Suite


@contextmanager
def suite(device: str) -> Iterator[Suite]:
    """Make the data set and the undisturbed training, in a folder that is removed at the end."""
    with tempfile.TemporaryDirectory(prefix="hpctrain-faults-") as folder:
        run_module("data_prep", "sample", "digits", f"{folder}/digits")
        yield Suite(Path(folder), Path(folder, "digits"), device)


def main() -> int:
    """Run the suite, and print a row after each event."""
    parser = argparse.ArgumentParser(prog="make faults", description=__doc__)
    parser.add_argument("--kills", type=int, default=0, help="random kills, beside each event")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="events whose name fits this pattern")
    parser.add_argument("--cluster", action="store_true", help="also events of a Slurm cluster")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="cuda: one GPU")
    parser.add_argument("--list", action="store_true", help="print the rows and end")
    asked = parser.parse_args()
    if asked.list:
        for event in (*EVENTS, *cluster_events.ON_CLUSTER):
            print(f"{event.name:34} {event.covered or 'here'}")
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what was started is ended
    with running() if asked.cluster else nullcontext(), suite(asked.device) as made:
        print(HEAD, flush=True)
        _run(made, asked)
        return bool(made.failed)


def _run(made: Suite, asked: argparse.Namespace) -> None:
    every = (*EVENTS, *(cluster_events.ON_CLUSTER if asked.cluster else ()))
    chosen = [each for each in every if each.act and re.search(asked.only, each.name)]
    for number, event in enumerate(chosen):
        try:
            if event in EVENTS:
                made.disturb([event], asked.seed + number)
            else:
                cluster_events.disturb(made, event, asked.seed + number)
        except AssertionError as error:
            made.rows[event.name].by_hand.append(f"seed {asked.seed + number}: {error}")
        row = made.rows[event.name]
        print("\n".join((row.line(event.name), *row.faults)), flush=True)
    rng, left = random.Random(asked.seed), asked.kills
    while left > 0:
        several = [rng.choice(KILLS) for _ in range(min(left, rng.randint(2, 6)))]
        if rng.random() < 0.5:
            several = [replace(each, writers=True, lost=2) for each in several]
        row, known = made.rows["random kills"], len(made.rows["random kills"].faults)
        made.disturb(several, rng.randrange(10**9), "random kills")
        left -= len(several)
        print("\n".join((row.line("random kills"), *row.faults[known:])), flush=True)


if __name__ == "__main__":
    sys.exit(main())
