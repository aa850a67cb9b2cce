"""One look at a user's model, task and optimizer, in two steps: what would train silently wrong?

    before step 1   do buffers, or masked rows, show that rows count that should not?   (`Rows`)
                    does the divided model give what the plain one gives?
    after step 2    what has changed in attributes, and would a resumed run have it?

A pass of these questions has the rows of a micro-batch and leaves no trace, so a run with the look
is the run without it. What torch and hpctrain bring is not asked: their own tests know it. A run
that goes on with the same code on as many ranks is not asked again.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable

import torch
from torch.distributed.fsdp import FSDPModule

from hpctrain.addons.looking.held_values import HeldValues
from hpctrain.addons.looking.rows import check_buffers, check_mask
from hpctrain.addons.looking.trial import TrialPasses
from hpctrain.base.errors import ConfigError
from hpctrain.base.terminal.terminal import few
from hpctrain.cluster.ranks.ranks import RankInfo
from hpctrain.data.device_prefetcher import DevicePrefetcher
from hpctrain.data.shards.types import Batch
from hpctrain.engine.distributed import objects
from hpctrain.engine.parallel.wrappers.parallel_model import ParallelModel
from hpctrain.engine.part import Part
from hpctrain.engine.tasks.task import Task, TaskState, at_step, is_foreign, name_of
from hpctrain.runs.run_dir import RunDir

log = logging.getLogger(__name__)
_LOOKS_AT = 2  # steps


class FirstLook(Part):
    """Looks at what is a user's own; all ranks call it together, and raise the same ConfigError.

    `filled` says whether batches of the training and whether batches of evaluations have rows that
    only fill them up.
    """

    def __init__(
        self,
        model: ParallelModel,
        task: Task,
        optimizer: torch.optim.Optimizer,
        filled: tuple[bool, bool],
    ) -> None:
        self._model, self._task, self._optimizer, self._filled = model, task, optimizer, filled
        self._own = _own(model, task, optimizer)
        self._made, self._seen = 0, list[HeldValues]()

    @classmethod
    def of(
        cls,
        run: RunDir,
        ranks: RankInfo,
        trained: tuple[ParallelModel, Task, torch.optim.Optimizer],
        loader: DevicePrefetcher,
        evaluations: Iterable[DevicePrefetcher],
        max_steps: int,
    ) -> FirstLook | None:
        """Return the look at the first steps of a run; None if there is nothing to look at.

        The attempt before may have had it, or all is torch's and ours.
        """
        if not any(_own(*trained)) or objects.broadcast(_looked(run) if ranks.is_main else None):
            return None
        evaluates = any(feed.steps.fills_up(feed.steps_per_epoch) for feed in evaluations)
        filled = loader.steps.fills_up(max_steps), evaluates
        return cls(*trained, filled)

    def before_step(self, batch: Batch) -> None:
        """Look at the model and the task with the batch of the next step."""
        if self._made or not any(self._own):
            return
        self._seen.append(self._held())
        if not any(self._own[:2]):
            return
        trial = TrialPasses(self._model, self._task, batch)
        if self._own[0]:
            check_buffers(trial, self._model, filled=self._filled[0])
            self._check_wrapped(trial)
        if any(self._filled):
            check_mask(trial, self._task, in_training=self._filled[0])

    def after_step(self, step: int, batch: Batch) -> None:
        """Look at what the step with this batch has changed."""
        self._made += 1
        if not self._seen:
            return
        self._seen.append(self._held())
        if self._made == _LOOKS_AT:
            self._check_kept(batch)
            self._check_equal()
            self._seen.clear()

    def _held(self) -> HeldValues:
        return HeldValues(self._model.module, self._task, self._optimizer)

    def _check_wrapped(self, trial: TrialPasses) -> None:
        """Refuse a model that looks at what FSDP2 has left on it, and computes something else."""
        if not isinstance(self._model.module, FSDPModule):
            return
        from hpctrain.engine.parallel.wrappers.fsdp import in_plain_classes

        divided = trial(train=True)
        with in_plain_classes(self._model.module):
            plain = trial(train=True)
        differ = divided.unlike(plain, trial.tolerance)
        _refuse(
            f"the model gives another {few(differ)} where FSDP "
            "divides it than it gives by itself: it looks at the class or at the attributes "
            "(_is_fsdp_managed_module) that FSDP gives its modules, as models of transformers with "
            "LayerDrop do. Use ddp (parallel.dp_shard=1), or train.compile=off, without which "
            "hpctrain removes these attributes"
            if differ
            else ""
        )

    def _check_kept(self, batch: Batch) -> None:
        """Refuse what a resumed run would not have: its next losses would be others."""
        begin, first, now = self._seen
        kept_back = [name for name in begin.changed() if name.startswith("optimizer.")]
        _refuse(
            f"{few(kept_back, 3)} of {name_of(self._optimizer)} changed in the first steps, and no "
            "checkpoint has it: a resumed run would begin again with what the constructor has "
            "made. A checkpoint has state[parameter] and param_groups: keep it there; what each "
            "step computes anew needs no attribute"
            if kept_back
            else ""
        )
        if not any(objects.all_gather(bool(begin.changed()))):
            return
        trial, kept = TrialPasses(self._model, self._task, batch), TaskState(self._task)
        state = kept.state_dict()
        at_step(self._task, self._model.step)
        now = self._held()
        begin.restore()  # as the constructors have made model and task
        kept.load_state_dict(state)
        at_step(self._task, self._model.step)
        lost = now.changed()
        resumed = trial(train=True)
        now.restore()
        kept.load_state_dict(state)
        differ = resumed.unlike(trial(train=True), trial.tolerance / 10)
        counters = now.grown(first) & first.grown(begin) & {*lost}
        named = sorted(counters) if counters else lost
        _refuse(
            f"{few(named, 3)} changed in the first steps, and no checkpoint has "
            f"{'it' if len(named) == 1 else 'them'}: a resumed run would begin again with what the "
            f"constructor has made{_of(differ)}. In a task, a method at_step(step) is told the "
            "global step, and methods state_dict() and load_state_dict(state) keep the rest; in a "
            "model, self.register_buffer(name, tensor) does; random numbers come from the global "
            "generators of torch, NumPy and Python, whose states a checkpoint has"
            if lost and (differ or counters)
            else ""
        )

    def _check_equal(self) -> None:
        """Refuse a state of the task that only some ranks have: a checkpoint has that of rank 0."""
        kept = TaskState(self._task)
        if not kept.exists:
            return
        states = objects.all_gather(json.dumps(kept.state_dict(), sort_keys=True))
        if other := next((rank for rank, state in enumerate(states) if state != states[0]), 0):
            raise ConfigError(
                f"{name_of(self._task)}.state_dict() is another one on rank {other} than on rank "
                "0, whose state a checkpoint has. What it counts of its own rows must be added up "
                "over the ranks (torch.distributed.all_reduce); the number of steps comes by a "
                "method at_step(step), also where only the last stage of a pipeline calls `sums`"
            )


def _own(
    model: ParallelModel, task: Task, optimizer: torch.optim.Optimizer
) -> tuple[bool, bool, bool]:
    """Return whether there is something of a user's own in the model, the task, the optimizer."""
    # The stages of a pipeline have other modules.
    own = any(objects.all_gather(any(map(is_foreign, model.module.modules()))))
    return own, is_foreign(task), is_foreign(optimizer)


def _looked(run: RunDir) -> bool:
    """Return whether the attempt before has looked at the same code, on as many ranks."""
    attempts = run.read().attempts
    if len(attempts) < 2:
        return not attempts  # a benchmark keeps nothing of what it trains
    before, now = attempts[-2:]
    if now.code_changed or before.world_size != now.world_size:
        return False
    return run.last_checkpoint() >= (before.first_step or 0) + _LOOKS_AT


def _of(names: Iterable[str]) -> str:
    found = list(names)
    return f", which gives another {few(found)}" if found else ""


def _refuse(problem: str) -> None:
    """Raise the first problem of all ranks, on all of them."""
    if found := next(filter(None, objects.all_gather(problem)), ""):
        raise ConfigError(found)
