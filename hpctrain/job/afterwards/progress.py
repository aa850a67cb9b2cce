"""The progress of an evaluation or of predictions, which one rank shows for all of them."""

from __future__ import annotations

from hpctrain.distributed.ranks import RankInfo
from hpctrain.progress_bar import Progress

_FIRST_S = 2.0  # until the line that estimates the time


def progress(ranks: RankInfo, samples: int, label: str) -> Progress:
    """Return the progress over all ranks: a bar on a terminal, lines elsewhere, both on stderr.

    Args:
        ranks: The rank of this process; those other than 0 show nothing.
        samples: The samples of all ranks together.
        label: The text before the numbers.
    """
    return Progress(samples, 0, label=label, quiet=not ranks.is_main, first_s=_FIRST_S)
