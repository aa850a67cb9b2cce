"""What failures of nodes cost, and the interval between checkpoints that costs least.

    MTBF of a node / nodes ─────────────── M, the mean time between failures of the job ──┐
    bytes / (nodes x rate of the storage) ─ d, the time of a save ────────────────────────┼── lost
    restart, and reading the checkpoint ── R, until the training goes on ─────────────────┘

A failure loses the work since the last checkpoint. With t seconds of work between two saves, a
second of work takes M e^(R / M) (e^((t + d) / M) - 1) / t seconds (Daly 2006, for failures at
random: doi:10.1016/j.future.2004.11.016), and t is best near sqrt(2 d M) (Young 1974).
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

from hpctrain.errors import ConfigError
from hpctrain.estimates.measured_run import MeasuredRun
from hpctrain.estimates.memory_fit import staged_bytes
from hpctrain.units import duration

_RESTART_S = 600.0  # from a failure to the next start, where no run has measured it (assumption)
# A measured save counts for checkpoints of at most so many times its bytes: a small one tells how
# long it takes to begin, and nothing of the storage.
_MOST_LARGER = 10
# A save in the background: how long the training waits for it, and how long it takes, with the
# steps in between; parts of the time of a save that the training waits for. These are what
# tests/benchmarks/test_save_stall.py tells on 2 busy cores, 0.19 and 2.2 to 2.8. The copy of an
# H100 is shorter: 55 GB/s, 0.03 of a write to its local disk.
_STALL, _DRAIN = 0.2, 2.5
_HOPELESS, _FAR = 0.99, 500.0  # a run that loses more does not end; e to this power is no time


@dataclass(frozen=True)
class Losses:
    """What failures and saves take of the time of a layout."""

    mtbf_s: float  # of the whole job
    checkpoint_bytes: float
    save_s: float  # for which the training waits
    restart_s: float  # from a failure until the training goes on; and what the save under way costs
    every_steps: int  # between two checkpoints: the number that costs least
    lost: float  # the part of the time that saves, lost work and restarts take
    every_steps_as_given: int | None  # `checkpoint.every_steps`
    lost_as_given: float

    @property
    def text(self) -> str:
        """The same for a reader."""
        mtbf, save = duration(self.mtbf_s), duration(self.save_s)
        return (
            f"one of the nodes fails every {mtbf}, and a save takes {save}: checkpoint.every_steps="
            f"{self.every_steps} loses least, {self.lost:.1%} of the time, which the hours have "
            f"({self.every_steps_as_given or 'no other save'} loses {self.lost_as_given:.1%})"
        )


@dataclass(frozen=True)
class Failures:
    """How often nodes fail, and how fast a job is back."""

    mtbf_s: float  # of one node
    restart_s: float  # from a failure to the first step, without reading the checkpoint
    rate: float  # bytes/s that a node writes to the storage, and reads from it
    text: str  # what they rest on, for a reader

    @classmethod
    def of(
        cls,
        hours: tuple[float, float | None],
        nbytes: float,
        storage: tuple[float | None, str],
        measured: Iterable[tuple[MeasuredRun, float]],
    ) -> Self:
        """Return those for checkpoints of `nbytes`; a ConfigError if the time of a save is unknown.

        `hours` are those of `--mtbf` and `--restart`; `storage` is the rate of a node and its
        source; the runs of `--from-run` come with the bytes of their checkpoints.
        """
        (mtbf, asked), (rate, source) = hours, storage
        restart, why = _RESTART_S, "an assumption; --restart sets it"
        for run, saved in measured:
            restart, why = run.startup_s, f"the start of {run.path.name}, without the queue"
            room = run.config.checkpoint.staging_gb, run.config.launch.mem_gb
            waited = not staged_bytes(saved / run.nodes, 0, run.ranks // run.nodes, *room)
            if run.checkpoint_s and waited and nbytes <= _MOST_LARGER * saved:
                rate, source = saved / run.nodes / run.checkpoint_s, f"saves of {run.path.name}"
        if rate is None:
            raise ConfigError(
                "--mtbf: how long a save takes is unknown: give hardware.storage_mb_per_s (of a "
                "node), measure it with doctor, or give --from-run a run that has saved as much"
            )
        if asked is not None:
            restart, why = 3600 * asked, "--restart"
        text = (
            f"of a node every {duration(3600 * mtbf)}, at random (Daly 2006); a node saves and "
            f"reads {rate / 1e6:,.0f} MB/s ({source}); the next start is after "
            f"{duration(restart)} ({why})"
        )
        return cls(3600 * mtbf, restart, rate, text)

    def losses(
        self,
        nodes: int,
        nbytes: float,
        step_s: float,
        steps: int | None,
        given: int | None,
        *,
        background: bool = False,
    ) -> Losses:
        """Return what is lost with checkpoints of so many bytes; a ConfigError if all is.

        `steps` are those of the run, None if they follow from a time; `given` is
        `checkpoint.every_steps`. A failure in the time of a save in the `background` costs what was
        done since the one before, too.
        """
        mtbf, save = self.mtbf_s / nodes, nbytes / (nodes * self.rate)
        restart, most = self.restart_s + save, math.inf if steps is None else steps
        if background:
            restart, save = restart + _DRAIN * save, _STALL * save
        every = int(max(1, min(round(best_interval(mtbf, save) / step_s), most)))
        counts = every, min(given or most, most)
        lost, as_given = (1 - 1 / stretch(mtbf, save, restart, n * step_s) for n in counts)
        if lost > _HOPELESS:
            raise ConfigError(
                f"--mtbf: one of {nodes} nodes fails every {duration(mtbf)}, a save takes "
                f"{duration(save)} and a restart {duration(restart)}: the run would "
                "not end"
            )
        return Losses(mtbf, nbytes, save, restart, every, lost, given, as_given)


def best_interval(mtbf: float, save: float) -> float:
    """Return the seconds of work between two saves that cost least (Daly 2006)."""
    part = save / (2 * mtbf)
    best = math.sqrt(2 * save * mtbf) * (1 + math.sqrt(part) / 3 + part / 9) - save
    return best if part < 1 else mtbf


def stretch(mtbf: float, save: float, restart: float, interval: float) -> float:
    """Return how many seconds a second of work takes; all arguments are in seconds (Daly 2006)."""
    if (interval + save + restart) / mtbf > _FAR:
        return math.inf
    return mtbf / interval * math.exp(restart / mtbf) * math.expm1((interval + save) / mtbf)
