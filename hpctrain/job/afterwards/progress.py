"""The progress of an evaluation or of predictions, which one rank shows for all of them."""

from __future__ import annotations

from hpctrain.distributed.ranks import RankInfo
from hpctrain.progress_bar import Progress

_FIRST_S = 2.0  # until the line that estimates the time


def progress(ranks: RankInfo, samples: int, label: str) -> Progress:
    """Return the progress over all ranks: a bar on a terminal, lines elsewhere, both on stderr."""
    return Progress(samples, 0, label=label, quiet=not ranks.is_main, first_s=_FIRST_S)
