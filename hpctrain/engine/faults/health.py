"""Health: no update is made from numbers that are not finite, and all ranks decide alike.

    sum of the losses of all ranks ── (the reduction of the step) ──┐
    norm of the global gradient ────────────────────────────────────┴── finite? ── update
                                                                           │
    train.nonfinite  stop       the run fails                              └── no
                     skip       this update is left out
                     rollback   the run goes back to its newest healthy checkpoint, and leaves out
                                the batch when it comes to it again

The sums carry a NaN or an infinity of any rank to all ranks, so this needs no communication of its
own. Only after such a step the ranks tell each other which of them had it first.

On the CPU the numbers are known before the update, which is then not made. On a GPU the host reads
them after it has queued the next step (see `Copied`), and before anything that lasts: a
log line, an evaluation, a checkpoint and the end of the run. For `stop` and `rollback` that is
early enough, because the parameters of this process are dropped and those of a checkpoint are
loaded. For `skip` the host waits for the numbers before the update.
"""

from __future__ import annotations

import json
import logging
import math
import socket
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hpctrain.base.errors import HealthError
from hpctrain.base.files.disk import write_atomically
from hpctrain.base.names.step_names import step_name
from hpctrain.base.terminal.terminal import few
from hpctrain.data.shards.types import Batch
from hpctrain.engine.distributed import objects
from hpctrain.engine.parallel.reducing.scalars import Copied, Number, is_late, send

log = logging.getLogger(__name__)

Samples = Sequence[tuple[str, int]]
_SHOWN = 3  # samples in a message; the file has all of them
_KEPT_BYTES = 64 << 20  # of a batch on a GPU


@dataclass(slots=True)
class Judged:
    """What a message says of a step."""

    step: int  # global, counted from 1
    consumed: int  # samples that the training has been given, over all ranks and epochs
    samples: Callable[[], Samples]  # returns those of this rank's part of the batch, (file, row)
    own_loss: float = 0.0  # the sum of this rank's losses
    # This rank's part of the batch, to find what is not finite in it; empty if it would occupy too
    # much memory of a GPU until the step is judged.
    batch: Batch = field(default_factory=dict)


class RolledBack(Exception):
    """The run goes on from its newest healthy checkpoint, in the same processes."""


class Health:
    """Judges every step, and responds to one that is not healthy.

    `policy` is the key `train.nonfinite`; at most `budget` of `_WINDOW` steps are left out. The
    samples of an unhealthy step are listed in the directory `run`.
    `left_out` are the batches that rollbacks have left out so far, as (global step, samples that
    the training had been given after the batch); `record` is called with them after a rollback.

    Attributes:
        skipped: The number of steps that were left out since the start of the run.
        left_out: The batches to leave out: the samples that the training has been given after each.
        names: Returns which numbers of the last step are not finite on this rank, in a loop that
            logs them by name; None if there is one loss.
        seen: Called with each healthy step and its mean loss over all ranks.
    """

    def __init__(
        self,
        policy: str = "stop",
        *,
        budget: int = 10,
        run: Path | None = None,
        left_out: Sequence[tuple[int, int]] = (),
        record: Callable[[list[tuple[int, int]]], None] = lambda _: None,
    ) -> None:
        self.policy, self.skipped = policy, len(left_out)
        self._budget, self._run = budget, run
        self._left_out, self._record = [*left_out], record
        self.seen: Callable[[int, float], None] = lambda step, loss: None
        self._steps = [step for step, _ in left_out]
        self.left_out = {consumed for _, consumed in left_out}
        self.names: Callable[[], Sequence[str]] | None = None
        self._offered = Copied()
        self._begun = self._last = Judged(0, 0, list)

    @property
    def undoes(self) -> bool:
        """Whether a step may be left out, so that what its forward pass changed is undone."""
        return self.policy == "skip"

    def begin(
        self, step: int, consumed: int, samples: Callable[[], Samples], batch: Batch | None = None
    ) -> None:
        """Say which step comes next; the arguments are those of `Judged`."""
        kept, nbytes = batch if isinstance(batch, dict) else {}, 0  # a loop's own may be anything
        for each in kept.values():
            if getattr(each, "is_cuda", False):
                nbytes += each.nbytes
        self._begun = Judged(step, consumed, samples, batch=kept if nbytes <= _KEPT_BYTES else {})

    def accepts(self, loss: Number, norm: Number | None, own_loss: Number, count: Number) -> bool:
        """Return whether the update may be made; on a GPU, True as long as it is not known.

        `loss` and `own_loss` are the sums of the losses of all ranks and of this one, which `count`
        divides; `norm` is that of the global gradient, or None if it does not count.
        """
        norm = loss if norm is None else norm
        self._offered.offer([loss, norm, own_loss, count], self._begun)
        send()
        return (is_late(loss) and not self.undoes) or not self.problem

    @property
    def problem(self) -> str:
        """What is wrong in the last step, or "" if it was judged: "loss", "gradient", "count"."""
        return _problem(self._offered.last())

    def judge(self, *, late: bool) -> None:
        """Judge the steps that were not judged yet; all ranks call this together.

        With `late`, the last step is judged later if its numbers come from a GPU. It returns if the
        steps are healthy, or if the run goes on without the update of one.

        Raises:
            HealthError: The run has to stop.
            RolledBack: The run has to go on from its newest healthy checkpoint.
        """
        for numbers, about in self._offered.take(late=late):
            self._last, about.own_loss = about, numbers[2]
            if problem := _problem(numbers):
                self.respond(problem, self._last)
            else:
                self.seen(about.step, numbers[0] / numbers[3])

    def judge_state(self, wrong: str) -> None:
        """Judge the model after the last step as `judge` does; `wrong` is such as "parameter x"."""
        if wrong:
            self.respond(wrong, self._last)

    def respond(self, problem: str, judged: Judged) -> None:
        """Respond to a step in which the `problem` is not finite; raise what `judge` raises."""
        step, cure = judged.step, _COUNTS if problem == _COUNT else _CURE
        if self.names is not None:
            cure = _GOES_ON if self.policy == "rollback" else _CURE_OF_OWN
        found = _gathered(problem, judged)
        subject = problem
        if self.names is not None and problem == _LOSS:
            every = dict.fromkeys(chain(*objects.all_gather([*self.names()])))
            subject = few(every, _SHOWN) or problem
        text = f"{subject} is not finite since step {step}"
        if problem == _COUNT:
            text = f"nothing counts in step {step}: the count of the task's loss is 0"
        if isinstance(found[0]["loss"], str):
            text += f" (first on rank {found[0]['rank']}, {found[0]['host']})"
        if self._run is not None:
            text += self._listed(text, step, found)
        if self.policy == "stop" or (self.policy == "skip" and problem not in _OF_STEP):
            raise HealthError(f"{text}. {cure}")
        self._steps = [each for each in self._steps if each > step - _WINDOW] + [step]
        self.skipped += 1
        if len(self._steps) > self._budget:
            raise HealthError(
                f"{text}. train.nonfinite={self.policy} has left out {self._budget} steps within "
                f"{_WINDOW} steps already. {cure}"
            )
        if dist.get_rank() == 0:
            log.warning(
                "%s: %s (%d of at most %d within %d steps)",
                *(text, _DOES[self.policy], len(self._steps), self._budget, _WINDOW),
            )
        if self.policy == "rollback":
            self._record([*self._left_out, (step, judged.consumed)])
            raise RolledBack

    def state_dict(self) -> dict[str, Any]:
        """Return which steps were left out, as JSON."""
        return {"skipped": self.skipped, "steps": self._steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with what `state_dict` returned; a rollback may have added steps since."""
        # One step may have left out several batches, one after the other.
        both = Counter[int](self._steps)
        both |= Counter[int](state["steps"])
        self._steps = sorted(both.elements())
        self.skipped = max(self.skipped, state["skipped"])

    def _listed(self, text: str, step: int, found: list[dict[str, Any]]) -> str:
        """Write the samples of the step into the run directory; return a text that names some."""
        assert self._run is not None
        file = self._run / "nonfinite" / f"{step_name(step)}.json"
        if dist.get_rank() == 0:
            try:
                file.parent.mkdir(exist_ok=True)
                content = {"step": step, "problem": text, "ranks": found}
                write_atomically(file, json.dumps(content, indent=1) + "\n")
            except OSError as error:
                log.warning("%s: not written (%s)", file, error.strerror)
        wrong = [each for rank in found for each in rank["not_finite"]]
        fields = ["{} of {} row {}".format(e["field"], *e["sample"]) for e in wrong]
        if fields:
            guilty = few(dict.fromkeys(fields), _SHOWN)
            return f"; not finite in the batch: {guilty} ({file})"
        # The ranks that divide a layer or the layers have the same samples.
        all_samples = list(dict.fromkeys((str(f), row) for r in found for f, row in r["samples"]))
        if not all_samples:
            return ""
        some = few((f"{name} row {row}" for name, row in all_samples), _SHOWN)
        finite = "; all fields of the batch are finite" * all(each["tested"] for each in found)
        return f"{finite}; its samples: {some} ({file})"


_WINDOW = 1000  # steps
_LOSS, _GRADIENT = "loss", "gradient"
_COUNT = "count"  # of the loss: a mean over nothing is no number
_OF_STEP = (_LOSS, _GRADIENT, _COUNT)
_DOES = {
    "skip": "the update is left out",
    "rollback": "the run goes back to its newest healthy checkpoint, and will leave out this batch",
}
_CURE = (
    "Resuming the run starts from its newest healthy checkpoint. If the samples are to blame, "
    "resume it with train.nonfinite=skip or rollback. If the training has diverged, begin a new "
    "run with a smaller optimizer.lr or with train.clip_norm"
)
_GOES_ON = "Resuming the run starts from its newest healthy checkpoint"
_CURE_OF_OWN = (
    f"{_GOES_ON}. If the batch is to blame, resume it with train.nonfinite=rollback, which leaves "
    "it out (in a loop that is a function)"
)
_COUNTS = (
    "If that is right for the data, train.nonfinite=skip leaves out such steps, at most "
    "10 within 1000; or let the task count what every batch "
    'has, such as its samples: batch["mask"].sum()'
)


def _problem(numbers: Sequence[float]) -> str:
    """Return what is wrong with the numbers that `accepts` has offered; "" also without them."""
    if not numbers:
        return ""
    loss, norm, _, count = numbers
    if not math.isfinite(loss):
        return _LOSS
    if not count:  # on a GPU the gradient is then not finite
        return _COUNT
    return "" if math.isfinite(norm) else _GRADIENT


def _gathered(problem: str, judged: Judged) -> list[dict[str, Any]]:
    """Return what each rank knows of the step: those that had the problem, or else all."""
    own = judged.own_loss
    mine = {
        "rank": dist.get_rank(),
        "host": socket.gethostname(),
        "loss": own if math.isfinite(own) else repr(own),  # JSON has no NaN
        "samples": judged.samples(),
        "tested": bool(judged.batch),
        "not_finite": _not_finite(judged),
    }
    known: list[dict[str, Any]] = objects.all_gather(mine)
    first = [each for each in known if isinstance(each["loss"], str)]
    return first if problem == "loss" and first else known


def _not_finite(judged: Judged) -> list[dict[str, Any]]:
    """Return the rows of the batch in which a field is not finite, the rarest fields first.

    A field in which many rows have a NaN may have it on purpose, where nobody has measured.
    """
    batch, samples = judged.batch, judged.samples()
    if "mask" not in batch:
        return []
    rows = batch["mask"].nonzero().flatten().tolist()
    fields: list[list[dict[str, Any]]] = []
    for name, values in batch.items():
        if not isinstance(values, torch.Tensor) or not values.dim():
            continue
        if not (values.is_floating_point() or values.is_complex()):
            continue
        counts = (~values.isfinite()).reshape(len(values), -1).sum(1).tolist()
        wrong = [(n, row) for n, row in enumerate(rows) if row < len(counts) and counts[row]]
        # A row may have several samples, which are packed, or none.
        names = samples if len(samples) == len(rows) else [("the batch", row) for row in rows]
        fields.append(
            [{"field": name, "sample": names[n], "values": counts[row]} for n, row in wrong]
        )
    return [each for found in sorted(fields, key=len) for each in found]
