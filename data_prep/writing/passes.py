"""The first of two passes, for duplicates and for stratified splits.

Both need all samples before the first sample is written. The first pass writes down a few bytes
for each sample. From these, one process decides which samples are left out and which split each
sample goes to. It needs about 100 bytes of memory for each sample.
"""

from functools import partial

import numpy as np
from numpy.typing import NDArray

from data_prep import processes
from data_prep.processes import Progress
from data_prep.writing.job import Choice, Job
from data_prep.writing.piece import Converter
from data_prep.writing.split import Fractions


def choose(converter: Converter, job: Job, progress: Progress) -> None:
    """Look at all pieces, and write the choice for the samples of each piece into the job's folder.

    Of equal samples the first one in the order of the source is kept.
    """
    options, folder = converter.options, job.pieces
    numbers = range(len(converter.source.pieces))
    if all(folder.choice_path(number).exists() for number in numbers):
        return
    todo = [number for number in numbers if not folder.look_path(number).exists()]
    task = partial(converter.look, folder)
    for _ in processes.run(task, todo, options.workers, progress):
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
        numbers_of = np.zeros(total, np.intp)  # samples that are left out may have any number
        numbers_of[keep] = options.split.stratified(keys, strata)
        chosen = list(np.split(numbers_of, ends))
    parts = zip(np.split(keep, ends), np.split(leaks, ends), chosen, strict=True)
    for number, (kept, leaked, split) in enumerate(parts):
        folder.choose(number, Choice(kept, int(leaked.sum()), names, split))


def _first(contents: NDArray[np.uint64]) -> NDArray[np.intp]:
    """Return for each row of `contents`, (n, 2), the number of the first row that equals it."""
    order = np.lexsort((contents[:, 1], contents[:, 0]))  # stable, so the first row stays first
    ordered = contents[order]
    begins = np.ones(len(order), bool)
    begins[1:] = (ordered[1:] != ordered[:-1]).any(axis=1)
    first = np.empty(len(order), np.intp)
    first[order] = order[begins][np.cumsum(begins) - 1]
    return first


def _numbered(parts: list[tuple[NDArray[np.str_], NDArray[np.intp]]]) -> NDArray[np.intp]:
    """Number names in one way for all parts, which have numbered them independently."""
    numbering: dict[str, int] = {}
    renumbered = []
    for names, numbers in parts:
        own = [numbering.setdefault(name, len(numbering)) for name in names.tolist()]
        renumbered.append(np.array(own, np.intp)[numbers])
    return np.concatenate(renumbered)
