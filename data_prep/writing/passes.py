"""The first of two passes, for duplicates and for splits that are stratified or by groups.

All need all samples before the first sample is written. The first pass writes down a few bytes
for each sample. From these, one process decides which samples are left out and which split each
sample goes to. It needs about 100 bytes of memory for each sample.
"""

from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data_prep import processes
from data_prep.options import Options
from data_prep.processes import Progress
from data_prep.writing.job import CHOICE, LOOK, Conversion
from data_prep.writing.piece import Converter
from data_prep.writing.split import Fractions
from hpctrain.data.samplers.groups import divide
from hpctrain.errors import DataError


class GroupError(DataError):
    """The groups do not fit the splits."""


Look = dict[str, NDArray[Any]]  # what `Converter.look` has written of a piece


def choose(converter: Converter, job: Conversion, progress: Progress) -> None:
    """Look at all pieces, and write the choice for the samples of each piece into the job's folder.

    Of equal samples the first one in the order of the source is kept.
    """
    options, folder = converter.options, job.pieces
    numbers = range(len(converter.source.pieces))
    if folder.seen(CHOICE).issuperset(numbers):
        return
    seen = folder.seen(LOOK)
    todo = [number for number in numbers if number not in seen]
    task = partial(converter.look, folder)
    for _ in processes.run(task, todo, options.workers, progress):
        pass
    looks = [folder.arrays(number, LOOK) for number in numbers]
    counts = [int(look["count"]) for look in looks]
    total, ends = sum(counts), np.cumsum(counts)[:-1]
    keep, leaks = np.ones(total, bool), np.zeros(total, bool)
    splits = np.zeros(0, np.intp)
    if not options.decides_splits:
        splits = _numbered([(look["names"], look["splits"]) for look in looks])
    if options.dedup == "exact":
        first = _first(_joined(looks, "contents"))
        keep = first == np.arange(total)
        if not options.decides_splits:
            leaks = splits != splits[first]
    decided: list[dict[str, Any]] = [{} for _ in looks]
    if options.decides_splits:
        assert isinstance(options.split, Fractions)
        names = np.array(list(options.split.fractions), str)
        numbers_of = np.zeros(total, np.intp)  # samples that are left out may have any number
        numbers_of[keep] = _decided(options, looks, keep)
        decided = [{"names": names, "splits": part} for part in np.split(numbers_of, ends)]
    elif options.group:
        _check_whole(options, looks, keep, splits)
    parts = zip(np.split(keep, ends), np.split(leaks, ends), decided, strict=True)
    for number, (kept, leaked, more) in enumerate(parts):
        folder.note(number, CHOICE, {"keep": kept, "leaks": leaked.sum(), **more})


def _decided(options: Options, looks: list[Look], keep: NDArray[np.bool_]) -> NDArray[np.intp]:
    """Return the number of the split of each sample that is kept."""
    assert isinstance(options.split, Fractions)
    strata = _joined(looks, "strata")[keep] if options.stratify else None
    if not options.group:
        assert strata is not None
        return options.split.stratified(_joined(looks, "keys")[keep], strata)
    fractions, groups = list(options.split.fractions.values()), _joined(looks, "groups")[keep]
    try:
        return divide(groups, fractions, strata=strata)
    except DataError as error:
        raise GroupError(f"--group {options.group}, --split {options.split}: {error}") from None


def _joined(looks: list[Look], what: str) -> NDArray[Any]:
    return np.concatenate([look[what] for look in looks])


def _check_whole(
    options: Options, looks: list[Look], keep: NDArray[np.bool_], splits: NDArray[np.intp]
) -> None:
    """Check that the files or the column of `--split` divide no group."""
    groups = _joined(looks, "groups")[keep]
    pairs = np.unique(np.stack([groups, splits[keep].astype(np.uint64)]), axis=1)
    found, counts = np.unique(pairs[0], return_counts=True)
    if divided := int((counts > 1).sum()):
        raise GroupError(
            f"--group {options.group}: {divided} of {len(found)} values are in several splits of "
            f"--split {options.split}; --split NAME=FRACTION,… keeps each in one"
        )


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
