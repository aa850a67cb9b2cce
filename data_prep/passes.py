"""What needs all samples before the first is written: duplicates, and proportions by class.

A first pass over the source notes a few bytes of each sample; from all of them it follows which
are left out, and where each goes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data_prep import processes
from data_prep.job import Job, JobFolder
from data_prep.piece import Choice, Converter, Progress
from data_prep.split import Fractions


def choices(converter: Converter, job: Job) -> dict[int, Choice]:
    """Look at all pieces; return what becomes of each one's samples.

    Of equal samples the first is kept, in the order of the source.
    """
    options, count = converter.options, job.plan.pieces
    todo = [number for number in range(count) if not job.pieces.look(number).exists()]
    task = _Look(converter, job.pieces)
    for _ in processes.run(task, todo, options.workers, lambda *_: None):
        pass
    looks = [dict(np.load(job.pieces.look(number))) for number in range(count)]
    ends = np.cumsum([len(look["keys"]) for look in looks])[:-1]
    contents, keys, strata = (
        np.concatenate([look[name] for look in looks]) for name in ("contents", "keys", "strata")
    )
    keep = np.ones(len(contents), bool)
    if options.dedup == "exact":
        keep[:] = False
        keep[np.unique(contents, return_index=True)[1]] = True
    splits: Sequence[Sequence[str] | None] = [None] * count
    if options.stratify:
        assert isinstance(options.split, Fractions)
        names = _stratified(options.split, keys, strata, keep)
        splits = [part.tolist() for part in np.split(names, ends)]
    return {
        number: Choice(kept, names)
        for number, (kept, names) in enumerate(zip(np.split(keep, ends), splits, strict=True))
    }


@dataclass(frozen=True)
class _Look:
    converter: Converter
    folder: JobFolder

    def __call__(self, number: int, progress: Progress) -> None:
        self.converter.look(self.folder, number, progress)


def _stratified(
    split: Fractions, keys: NDArray[np.uint64], strata: NDArray[Any], keep: NDArray[np.bool_]
) -> NDArray[Any]:
    """Proportions of what is kept; what is not gets a name all the same."""
    names = np.full(len(keys), next(iter(split.fractions)), object)
    kept = np.flatnonzero(keep)
    names[kept] = split.stratified(keys[kept], strata[kept].tolist())
    return names
