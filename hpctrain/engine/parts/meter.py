"""What the training measures of itself: speed, times of steps, memory, and where the time went.

    each step    its end ── StepTimes; what it was given ── a list
    spent(...)   evaluations, checkpoints, reports ── Account; they are left out of the speed
    report       the metrics `perf/…` since the last report ── the tracker; and a record `time`

A step costs one reading of a clock and two entries of lists, because each object that it touches is
far from the core when the step before has used all of the cache. What costs more is done at
reports, where the host waits for the device anyway.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from operator import add, sub
from typing import Any, NamedTuple

import torch

from hpctrain.base import offered
from hpctrain.base.processes import marks
from hpctrain.base.units import GIB
from hpctrain.config import metric_registry as names
from hpctrain.data.shards.types import Batch
from hpctrain.engine.feeds import Feed
from hpctrain.engine.parallel.precision import Precision
from hpctrain.engine.parts.clocks import Account, Interval, StepTimes, WorkClock, percentile
from hpctrain.tracking.tracker import Tracker

_RECORD_S = 1.0  # seconds; reports that follow each other sooner have one record `time` together


class _Seconds(NamedTuple):
    """Seconds by several clocks: readings, or what has passed between two of them."""

    at: float = 0.0
    worked: float = 0.0
    waited: float = 0.0
    compiled: float = 0.0


class Meter:
    """Measures the training of one rank.

    A step has at most the `batch_size` samples of the loader; the last one of an epoch may have
    fewer. The meters of an attempt share the account of where its seconds went. One rank alone has
    no `slow_ranks`. `counts_samples` tells whether the loader knows its samples, and
    `counts_tokens` whether the count of the task's loss is one of tokens.
    """

    def __init__(
        self,
        loader: Feed,
        account: Account,
        slow_ranks: offered.slow_ranks.SlowRanks | None,
        precision: Precision,
        tracker: Tracker,
        *,
        counts_samples: bool = True,
        counts_tokens: bool = False,
        utilisation: offered.Utilisation | None = None,
    ) -> None:
        self._loader = loader
        self._account, self._slow_ranks = account, slow_ranks
        self._precision, self._tracker, self._counts_tokens = precision, tracker, counts_tokens
        self._counts_samples = counts_samples
        self._utilisation = utilisation
        self._on_gpu = precision.device.type == "cuda"
        # The time that a rank waits for others is known where a thread that waits sleeps. The host
        # of a GPU does not wait; the GPU does, and it does not tell.
        sleeps = account.devices > 1 and not self._on_gpu
        self._work = WorkClock() if sleeps else None
        self._times = StepTimes(precision.device)
        self._given: list[tuple[int, Any]] = []  # the loader's state and the batch of each step
        self._samples = self._samples_before = self._tokens = self._step = 0
        self._checkpoint_s = self._evaluation_s = self._asleep_s = 0.0
        self._paused, self._recorded = False, -float("inf")

    def begin(self, step: int) -> None:
        """Begin to measure at a global step: the next thing that the training does is a step."""
        self._account.enter("compute")
        self._step, self._consumed = step, self._loader.state_dict()["consumed"]
        self._begin_interval()
        self._go_on()

    def after_step(self, step: int, consumed: int, batch: Batch) -> None:
        """Note the end of a global step, counted from 1, after this rank's `batch`.

        `consumed` is the state of the loader after it.
        """
        self._step = step
        self._times.step()
        marks.stepped(step)
        self._given.append((consumed, self._loader.last))
        if self._utilisation is not None:
            self._utilisation.see(batch)
            if self._utilisation.due:
                with self.spent("startup"):
                    self._utilisation.begin(batch)

    @contextmanager
    def spent(self, part: str) -> Iterator[None]:
        """Count the context for a part of the `Account`, and not for the steps."""
        self._settle()
        self._paused, began = True, self._before.at
        self._account.enter(part)
        try:
            yield
        finally:
            self._account.enter("compute")
            self._go_on()
            took = self._before.at - began
            if part == "checkpoint":
                self._checkpoint_s += took
                self._record()
            elif part == "evaluation":
                self._evaluation_s = took

    def report(self, counts: Mapping[str, float]) -> dict[str, float]:
        """Return the metrics of the steps since the last report; all ranks call this together.

        In a context `spent("other")` its own time is no part of the next step. `counts` are what
        the sums of these steps were divided by, over all ranks, by name.
        """
        self._settle()
        took, times = self._took, sorted(self._times.take())
        elapsed = max(took.at, 1e-9)
        memory = _memory(self._precision.device) if self._on_gpu else (0.0, 0.0)
        if self._slow_ranks is not None:
            own = Interval(elapsed, took.worked, took.waited, memory)
            memory, lost_s = self._slow_ranks.compare(own)
            self._account.lose(lost_s)
        speed = (self._samples - self._samples_before) / elapsed
        found: dict[str, float] = {}
        if self._counts_samples:
            found |= {names.SAMPLES_PER_S: speed, names.SAMPLES_SEEN: self._samples}
        found[names.DATA_WAIT_FRACTION] = took.waited / elapsed
        if self._counts_tokens:
            tokens = int(counts.get("loss", 0))
            self._tokens += tokens
            found |= {names.TOKENS_PER_S: tokens / elapsed, names.TOKENS_SEEN: self._tokens}
        if times:
            found[names.STEP_MS_P50] = 1000 * percentile(times, 50)
            found[names.STEP_MS_P95] = 1000 * percentile(times, 95)
            found[names.STEP_MS_MAX] = 1000 * times[-1]
        if self._utilisation is not None:
            found |= self._utilisation.metrics(speed)
        if self._work is not None:
            found[names.COMMUNICATION_FRACTION] = self._asleep_s / elapsed
        if self._on_gpu:
            found |= {
                names.MEMORY_PEAK_GIB: memory[0] / GIB,
                names.MEMORY_RESERVED_GIB: memory[1] / GIB,
                names.GPU_HOURS: self._account.device_s / 3600,
            }
        if self._precision.compute == "fp16":
            found[names.LOSS_SCALE] = self._precision.scale
        if self._checkpoint_s:
            found[names.CHECKPOINT_S] = self._checkpoint_s
        if self._before.at - self._recorded >= _RECORD_S:
            self._record()
        self._begin_interval()
        return found

    def evaluated(self) -> dict[str, float]:
        """Return the metrics of the evaluation that has just been made."""
        return {names.EVALUATION_S: self._evaluation_s}

    def state_dict(self) -> dict[str, Any]:
        """Return what has to survive a resume, as JSON."""
        self._count_samples()
        return {"samples": self._samples, "tokens": self._tokens}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` returned; older checkpoints do not have it."""
        self._samples = state.get("samples", self._loader.state_dict()["consumed"])
        self._tokens = state.get("tokens", 0)

    def close(self) -> None:
        """Record where the time of this attempt went."""
        self._settle()
        self._account.enter("other")
        self._record()
        if self._work is not None:
            self._work.close()

    def _begin_interval(self) -> None:
        self._took, self._asleep_s, self._checkpoint_s = _Seconds(), 0.0, 0.0
        self._samples_before = self._samples

    def _now(self) -> _Seconds:
        worked = self._work() if self._work is not None else 0.0
        return _Seconds(time.monotonic(), worked, self._loader.wait_s, _compiled_s())

    def _go_on(self) -> None:
        """Go on with steps: what was before does not count for them."""
        self._paused, self._before = False, self._now()
        self._times.begin()

    def _settle(self) -> None:
        """Divide the time since the last call, in which steps were made, into its parts."""
        if self._paused:
            return
        self._count_samples()
        now = self._now()
        took, self._before = _Seconds(*map(sub, now, self._before)), now
        self._took = _Seconds(*map(add, self._took, took))
        self._account.move("data_wait", took.waited)
        # What came after the last step, such as a user's hook, is no part of a step.
        after = max(0.0, min(self._times.since_step(), took.at - took.waited))
        self._account.move("other", after)
        if took.compiled:
            self._account.move("compile", took.compiled)
        # A compiler that this thread waits for is no other rank.
        if self._work is not None and not took.compiled:
            asleep = max(0.0, took.at - took.worked - took.waited - after)
            self._asleep_s += asleep
            self._account.move("communication", asleep)

    def _count_samples(self) -> None:
        for consumed, given in self._given:
            # The rest of an epoch may be left out, and a batch that was not healthy.
            self._samples += min(consumed - self._consumed, given.group.batch_size)
            self._consumed = consumed
        self._given.clear()

    def _record(self) -> None:
        self._recorded = self._before.at
        seconds = self._account.seconds()
        if self._on_gpu and self._account.devices > 1:
            del seconds["communication"]  # it is in `compute`
        self._tracker.log_time(seconds, self._step, self._account.device_s)


def _memory(device: torch.device) -> tuple[float, float]:
    """Return the peaks of the memory of this GPU: needed by tensors, and reserved; in bytes."""
    needed = torch.cuda.max_memory_allocated(device)
    return float(needed), float(torch.cuda.max_memory_reserved(device))


def _compiled_s() -> float:
    """Return the seconds that torch.compile has taken in this process so far."""
    dynamo = sys.modules.get("torch._dynamo.utils")  # it is imported only where it is used
    spent = getattr(dynamo, "calculate_time_spent", None)
    return float(spent()["total_wall_time"]) if spent is not None else 0.0
