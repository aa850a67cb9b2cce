"""Measures one competitor in its own process.

python -m tests.benchmarks.loaders.child NAME        (from the root of the checkout)

Each request is a line of JSON on stdin, and each answer is a line of JSON on stdout.
"""

import gc
import importlib.metadata
import json
import os
import sys
import time
import traceback
import warnings
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from tests.benchmarks.loaders.competitor import Competitor
from tests.benchmarks.loaders.competitors import COMPETITORS
from tests.benchmarks.loaders.works import COLD, WORKS, Batch, tensor

STARTS = 2


class Child:
    """Answers requests about one competitor; each public method is a request."""

    def __init__(self, kind: type[Competitor]) -> None:
        self.kind = kind
        self.halfway: Any = None

    def hello(self) -> str:
        """Return the version of the competitor's package; "" if it needs no package."""
        name = self.kind.package
        return importlib.metadata.version(name) if name else ""

    def write(self, work: str, root: str, cold: bool = False) -> None:
        """Write a data set in the competitor's format; later requests are about this data set."""
        self.work, self.folder = (COLD if cold else WORKS)[work], Path(root, self.kind.__name__)
        self.folder.mkdir()
        self.raw = self.work.arrays(self.folder.parent)
        self.kind.write(self.work, self.folder)

    def check(self) -> dict[str, Any]:
        """Count the samples that an epoch misses and repeats if it is resumed halfway.

        `same_order` says whether the rest of the epoch is the same as without the interruption.
        """
        work, half = self.work, self.work.steps // 2
        before, straight = self._take(half, work.steps - half)
        _, after = self._take(0, work.steps - half, self.halfway)
        given = len(before + after)
        return {
            "missed": work.steps * work.batch - len(set(before + after)),
            "repeated": given - len(set(before + after)),
            "same_order": after == straight,
        }

    def _take(self, half: int, rest: int, state: Any = None) -> tuple[list[int], list[int]]:
        """Return the sample numbers of the next `half` batches, and of the `rest` after them.

        Without `state`, the state between the two parts is kept in `halfway`.
        """
        loader = self.kind(self.work, self.folder, state=state)
        batches = loader.batches()
        before = [number for batch in islice(batches, half) for number in self._verified(batch)]
        if state is None:
            self.halfway = loader.state(half)
        after = [number for batch in islice(batches, rest) for number in self._verified(batch)]
        _close(loader, batches)
        return before, after

    def _verified(self, batch: Batch) -> list[int]:
        """Return the sample numbers of a batch; its first sample is compared with the source."""
        numbers = self.work.numbers(batch)
        for name, array in self.raw.items():
            if not torch.equal(batch[name][0], tensor(array[numbers[:1]])[0]):
                raise ValueError(f"{name} {numbers[0]} is not what was written")
        return numbers

    def start(self, resume: bool = False) -> float | None:
        """Return the milliseconds from opening to the first batch, the least of STARTS.

        With `resume` the first batch is the one in the middle of the epoch; None if the
        competitor cannot resume.
        """
        if resume and self.halfway is None:
            return None
        return min(self._start(self.halfway if resume else None) for _ in range(STARTS))

    def _start(self, state: Any) -> float:
        start = time.perf_counter()
        loader = self.kind(self.work, self.folder, state=state)
        batches = loader.batches()
        next(batches)
        took = time.perf_counter() - start
        _close(loader, batches)
        return took * 1e3

    def speed(self, epochs: int, workers: int = 0) -> float:
        """Return MB/s of sample bytes, from opening to the end of the last epoch.

        The loop does nothing with the batches.
        """
        start = time.perf_counter()
        loader = self.kind(self.work, self.folder, workers)
        batches = loader.batches()
        for batch in islice(batches, epochs * self.work.steps):  # noqa: B007
            pass
        took = time.perf_counter() - start
        _close(loader, batches)
        return epochs * self.work.steps * self.work.batch * self.work.sample_bytes / took / 1e6


def _close(loader: Competitor, batches: Any) -> None:
    """End the loader's threads; its processes and files end with the last reference to it."""
    batches.close()
    loader.close()


def main() -> None:
    # Some peers print to stdout, which is only for answers: their text goes to stderr.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    warnings.simplefilter("ignore")
    child = Child(COMPETITORS[sys.argv[1]])
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = {"result": getattr(child, request.pop("do"))(**request)}
        except Exception as error:  # reported in the table; the other competitors go on
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        gc.collect()  # closes files before the next request
        print(json.dumps(answer), file=answers)


if __name__ == "__main__":
    main()
