"""The first of two passes, for splits that are stratified or by groups.

Both need all samples before the first sample is written. The first pass writes down a few bytes
for each sample. From these, one process decides which split each sample goes to. It needs about 100
bytes of memory for each sample.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data_prep import processes
from data_prep.options import Options
from data_prep.processes import Progress
from data_prep.writing.job import Conversion
from data_prep.writing.piece import Converter, FirstPassError
from data_prep.writing.split import Fractions
from hpctrain.base.errors import DataError
from hpctrain.data.samplers.groups import divide

Look = dict[str, NDArray[Any]]  # what `Converter.look` has written of a piece


def choose(converter: Converter, job: Conversion, progress: Progress) -> Converter:
    """Look at all pieces, and return a converter that knows the counts and splits of the samples.

    The splits, if they are not those of a column or of the files, are in the job's folder.
    """
    options, folder = converter.options, job.pieces
    numbers, seen = range(len(converter.source.pieces)), folder.seen()
    todo = [number for number in numbers if number not in seen]
    for _ in processes.run(partial(converter.look, folder), todo, options.workers, progress):
        pass
    looks = [folder.look(number) for number in numbers]
    if options.decides_splits:
        folder.choose(_decided(options, looks))
    else:
        _check_whole(options, looks)
    return replace(converter, counts=[int(look["count"]) for look in looks])


def _decided(options: Options, looks: list[Look]) -> NDArray[np.intp]:
    """Return the number of the split of each sample."""
    assert isinstance(options.split, Fractions)
    strata = _joined(looks, "strata") if options.stratify else None
    if not options.group:
        assert strata is not None
        return options.split.stratified(_joined(looks, "keys"), strata)
    fractions, groups = list(options.split.fractions.values()), _joined(looks, "groups")
    try:
        return divide(groups, fractions, strata=strata)
    except DataError as error:
        raise FirstPassError(f"--group {options.group}, --split {options.split}: {error}") from None


def _joined(looks: list[Look], what: str) -> NDArray[Any]:
    return np.concatenate([look[what] for look in looks])


def _check_whole(options: Options, looks: list[Look]) -> None:
    """Check that the files or the column of `--split` divide no group."""
    groups = _joined(looks, "groups")
    splits = _numbered([(look["names"], look["splits"]) for look in looks])
    pairs = np.unique(np.stack([groups, splits.astype(np.uint64)]), axis=1)
    found, counts = np.unique(pairs[0], return_counts=True)
    if divided := int((counts > 1).sum()):
        raise FirstPassError(
            f"--group {options.group}: {divided} of {len(found)} values are in several splits of "
            f"--split {options.split}; --split NAME=FRACTION,… keeps each in one"
        )


def _numbered(parts: list[tuple[NDArray[np.str_], NDArray[np.intp]]]) -> NDArray[np.intp]:
    """Number names in one way for all parts, which have numbered them independently."""
    numbering: dict[str, int] = {}
    renumbered = []
    for names, numbers in parts:
        own = [numbering.setdefault(name, len(numbering)) for name in names.tolist()]
        renumbered.append(np.array(own, np.intp)[numbers])
    return np.concatenate(renumbered)
