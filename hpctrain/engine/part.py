"""A part of a run: what watches or changes a training, and is not its loop.

before_step ── the loop's step: flags and offer in its one reduction ── after_step
log step       report ── logged ── reported
between        an evaluation, or whatever else all ranks do together between two steps
save           state_dict ... after_save, once the checkpoint is on the disk

A part knows no other part. It overrides what it needs: what it does not override is not called, and
costs nothing in a step. All ranks call the same methods of the same parts at the same steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from hpctrain.data.shards.types import Batch
from hpctrain.engine.parallel.reducing.scalars import Numbers


class Part:
    """The base class of a part.

    Attributes:
        name: Under which a checkpoint has its state; "" if it has none.
        session: The steps of the run (`hpctrain.engine.steps.stepping.Stepping`), once they have
            begun.
    """

    name = ""
    session: Any

    @property
    def over(self) -> str:
        """Why the training shall end before its last step, the same on all ranks; "" if not."""
        return ""

    def begin(self, step: int) -> None:
        """Begin at a global step, after the checkpoint was loaded."""

    def before_step(self, batch: Batch) -> None:
        """Look at the batch of the next step."""

    def flags(self) -> list[float]:
        """Return this rank's numbers for the step's reduction, always as many; it adds them up."""
        return []

    def offer(self, totals: Numbers) -> None:
        """Take the sums of the flags over all ranks, shape (n,), without waiting for the device."""

    def after_backward(self) -> None:
        """Look at the gradients of a step of our own loop, before they are scaled."""

    def after_update(self) -> None:
        """Follow an update of the parameters in our own loop."""

    def after_step(self, step: int, batch: Batch) -> None:
        """Do something after a global step, counted from 1."""

    def wants_report(self) -> bool:
        """Return whether this step shall be reported, the same on all ranks."""
        return False

    def report(self) -> dict[str, float]:
        """Return metrics of the steps since the last report."""
        return {}

    def logged(self, metrics: Mapping[str, float], step: int) -> None:
        """Take metrics that are new at a step, the same on all ranks."""

    def reported(self, step: int) -> None:
        """Do something after the report of a step."""

    def between(self, step: int) -> bool:
        """Do what is due after a step, or at once when a run goes on.

        Return False if the ranks have agreed to stop in it; it is due in the next attempt then.
        """
        return True

    def before_evaluation(self) -> None:
        """Do something before an evaluation; the random states are restored after it."""

    def after_evaluation(self) -> None:
        """Do something with the results of an evaluation."""

    def at_pause(self) -> dict[str, float] | None:
        """Return metrics of the step at which the run pauses; None if the ranks agree to stop."""
        return {}

    def ends(self, step: int) -> None:
        """Learn that the training ends at this step, before its last one."""

    def finish(self) -> None:
        """Do what is left after the last step of the run."""

    def after_save(self, step: int, metrics: Mapping[str, float], folder: Path) -> None:
        """Do something with the checkpoint of a step, which is on the disk."""

    def close(self) -> None:
        """End what was started, also after an error."""

    def state_dict(self) -> Any:
        """Return what the part needs to go on, as JSON; rank 0's is saved."""
        return {}

    def load_state_dict(self, state: Any) -> None:
        """Go on from what `state_dict` returned; {} if the checkpoint has none."""


def overriding(parts: Iterable[Part], method: str) -> list[Callable[..., Any]]:
    """Return this method of the parts that override it, in their order."""
    own = (part for part in parts if getattr(type(part), method) is not getattr(Part, method))
    return [getattr(part, method) for part in own]
