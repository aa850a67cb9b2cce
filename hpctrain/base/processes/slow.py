"""What "slow" means: one vocabulary, and the limits of every judgement in one place.

    a rank    its own part of the steps against the median of the others   training.measuring
    a GPU     its clock against the median of the busy ones                top
    a figure  what was measured against the median of all                  doctor
    a link    the same, of the fastest pair of a node                      doctor

"Slow" compares with others that do the same work. "Silent" is what tells nothing for a while,
"idle" what has nothing to do, and "late" a rank that has not come to a collective operation.
"""

from typing import NamedTuple


class _Rank(NamedTuple):
    """When a rank is slow."""

    times: float  # as long as the median of the others
    share: float  # of the time of the steps that the others lose


RANK = _Rank(1.5, 0.2)  # a note names it
RANK_S = 10.0  # of training, before a note names a rank

GPU_CLOCK = 0.9  # of the median
BUSY_PERCENT = 50.0  # the clock of a GPU without work says nothing


class _Part(NamedTuple):
    """The part of the median below which a figure warns or fails."""

    warns: float
    fails: float = 0.0


FIGURE = _Part(0.8, 0.5)
LINK = _Part(0.7, 0.5)
