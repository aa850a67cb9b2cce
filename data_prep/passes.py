"""What needs all samples before the first is written: duplicates, and proportions by class.

A first pass over the source notes a few bytes of each sample; from all of them it follows which
are left out, and where each goes. That takes about 100 bytes of memory a sample, in one process.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from data_prep import processes
from data_prep.job import Choice, Job, JobFolder
from data_prep.piece import Converter
from data_prep.processes import Progress
from data_prep.split import Fractions


def choose(converter: Converter, job: Job, progress: Progress) -> None:
    """Look at all pieces, and note in the job's folder what becomes of each one's samples.

    Of equal samples the first is kept, in the order of the source.
    """
    options, folder = converter.options, job.pieces
    numbers = range(len(converter.source.pieces))
    if all(folder.choice_path(number).exists() for number in numbers):
        return
    todo = [number for number in numbers if not folder.look_path(number).exists()]
    for _ in processes.run(_Look(converter, folder), todo, options.workers, progress):
        pass
    looks = [folder.look(number) for number in numbers]
    ends = np.cumsum([int(look["count"]) for look in looks])[:-1]
    total = sum(int(look["count"]) for look in looks)
    keep, leaks = np.ones(total, bool), np.zeros(total, bool)
    if options.dedup == "exact":
        first = _first(np.concatenate([look["contents"] for look in looks]))
        keep = first == np.arange(total)
        if not options.stratify:
            splits = _numbered([(look["names"], look["splits"]) for look in looks])
            leaks = splits != splits[first]
    names: list[str] = []
    chosen: list[NDArray[np.intp] | None] = [None] * len(looks)
    if options.stratify:
        assert isinstance(options.split, Fractions)
        names = list(options.split.fractions)
        keys, strata = (
            np.concatenate([look[what] for look in looks])[keep] for what in ("keys", "strata")
        )
        numbers_of = np.zeros(total, np.intp)  # of what is left out: any
        numbers_of[keep] = options.split.stratified(keys, strata)
        chosen = list(np.split(numbers_of, ends))
    parts = zip(np.split(keep, ends), np.split(leaks, ends), chosen, strict=True)
    for number, (kept, leaked, split) in enumerate(parts):
        folder.choose(number, Choice(kept, int(leaked.sum()), names, split))


@dataclass(frozen=True)
class _Look:
    converter: Converter
    folder: JobFolder

    def __call__(self, number: int, progress: Progress) -> Callable[[], None]:
        self.converter.look(self.folder, number, progress)
        return lambda: None


def _first(contents: NDArray[np.uint64]) -> NDArray[np.intp]:
    """The number of the first row that is equal, for each of (n, 2)."""
    order = np.lexsort((contents[:, 1], contents[:, 0]))  # stable: the first is the first
    ordered = contents[order]
    begins = np.ones(len(order), bool)
    begins[1:] = (ordered[1:] != ordered[:-1]).any(axis=1)
    first = np.empty(len(order), np.intp)
    first[order] = order[begins][np.cumsum(begins) - 1]
    return first


def _numbered(parts: list[tuple[NDArray[np.str_], NDArray[np.intp]]]) -> NDArray[np.intp]:
    """One numbering for names that each part has numbered for itself."""
    known: dict[str, int] = {}
    return np.concatenate(
        [
            np.array([known.setdefault(name, len(known)) for name in names.tolist()], np.intp)[
                numbers
            ]
            for names, numbers in parts
        ]
    )
