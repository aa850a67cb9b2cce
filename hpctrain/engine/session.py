"""The session of a run: what a loop needs around it, from the exact next batch to the last save.

    def train(session: hpctrain.Session, z: int = 64) -> None:
        model = session.model("g", Generator(z))
        optimizer = session.optimizer("og", torch.optim.Adam(model.parameters(), 2e-4))
        for step, batch in session.steps(session.data("train"), max_steps=10_000):
            ...
            session.log({"train/loss": loss})

`python -m hpctrain loop=gan` calls it for a config `loop/gan.yaml` with `_target_` and arguments;
`with hpctrain.session(...) as session` opens one in a program of one's own. All ranks of a run call
the same methods in the same order.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import torch
import xxhash
from torch import nn

from hpctrain.base.errors import ConfigError, LoopError
from hpctrain.base.forks import forks_end_here
from hpctrain.data.device_prefetcher import DevicePrefetcher
from hpctrain.data.generators import seed_generators
from hpctrain.engine.building.build_steps import Around, parts_of_user, patience_of
from hpctrain.engine.building.parts import Parts
from hpctrain.engine.feeds import OwnFeed, Pass
from hpctrain.engine.parallel.own_loop import follow, spread
from hpctrain.engine.parallel.wrappers.parallel_model import ParallelModel
from hpctrain.engine.part import Part
from hpctrain.engine.steps.kept import Kept
from hpctrain.engine.steps.logged import Ending, Logged, Number
from hpctrain.engine.steps.place import Place
from hpctrain.engine.steps.stepping import Outcome, Stepping

log = logging.getLogger(__name__)
T = TypeVar("T")
_DATA = "data of steps"  # the name of a position that is kept: no name of a loop's own


class Stopped(BaseException):
    """The run was stopped on request, or has paused, and has saved: the loop ends here."""


class Session:
    """One run on this rank.

    Attributes:
        rank: This process among all of the run, 0 <= rank < world_size.
        local_rank: This process among those of its node.
        world_size: The number of processes of the run.
        device: Where this rank computes.
        run_dir: The run directory; only files of the loop's own belong into it.
        step: The steps that were made so far, over all attempts.
        metrics: The last value of every metric, the same on all ranks.
    """

    def __init__(self, place: Place) -> None:
        self.place = place  # what the run has on this rank, for loops within hpctrain
        ranks = place.ranks
        self.rank, self.local_rank, self.world_size = ranks.rank, ranks.local_rank, ranks.world_size
        self.device, self.run_dir = place.device, Path(place.run.path)
        self._models: dict[str, ParallelModel] = {}
        self._optimizers: dict[str, torch.optim.Optimizer] = {}
        self._names: set[str] = set()
        self._closing = ExitStack()
        self._stepping: Stepping | None = None
        self._entered = False
        self._logged: Logged | None = None

    # --- what there is

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which alone writes files and prints."""
        return self.rank == 0

    @property
    def step(self) -> int:
        """The steps that were made so far."""
        return self._stepping.step if self._stepping is not None else 0

    @property
    def metrics(self) -> Mapping[str, float]:
        """The last value of every metric."""
        return dict(self._stepping.metrics) if self._stepping is not None else {}

    @property
    def outcome(self) -> Outcome | None:
        """How the steps have ended; None before."""
        return self._stepping.outcome if self._stepping is not None else None

    # --- what a loop brings

    def model(self, name: str, module: nn.Module | Callable[[], nn.Module]) -> nn.Module:
        """Spread a module over the ranks as the section `parallel` says, and keep it.

        Args:
            name: Its name in the checkpoints.
            module: It, or a function that builds it. All ranks get the values of rank 0.

        Returns:
            The module to be called: optimizers take its parameters. After `backward` their
            gradients are means over the ranks, so a loss is a mean over the rows of a rank.

        Raises:
            ConfigError: The layout is one that only our own loop knows (tensor, pipeline, context
                and expert parallel), or the format of the numbers is.
            LoopError: The name is taken, or the steps have begun.
        """
        self._take(name, "model")
        parts, parallel = self._parts, self.place.config.parallel
        # Two models of one class begin with other values.
        seed = self.place.config.seed + xxhash.xxh32_intdigest(name.encode())
        made = spread(module, parallel, parts.mesh, parts.precision, seed=seed)
        self._models[name] = made
        return made.module

    def optimizer(self, name: str, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Keep an optimizer, whose parameters are those of models of this session; return it."""
        self._take(name, "optimizer")
        follow(optimizer, self._models.values())
        self._optimizers[name] = optimizer
        return optimizer

    def keep(self, name: str, thing: T, *, each_rank: bool = False) -> T:
        """Keep anything with a state_dict in the checkpoints, or a generator; return it.

        Args:
            name: Its name in the checkpoints.
            thing: It has `state_dict()` and `load_state_dict(state)`, as a scheduler of torch, or
                is a generator of torch, NumPy or Python. A state has numbers, texts, bytes,
                tensors, arrays, and lists and dicts of these.
            each_rank: Each rank has a state of its own. Otherwise all have the same, and that of
                rank 0 is saved.
        """
        self._take(name, "keep")
        self._kept.add(name, thing, each_rank=each_rank)
        return thing

    def data(self, split: str = "train") -> DevicePrefetcher | Pass:
        """Return the batches of this rank in a split of `data.path`, on the device.

        Those of the training split follow each other without an end, in the order that the section
        `data` says. Those of another split (`val` is data.val_split), or of one of `data.val_sets`,
        are each sample once, at every `for`. A batch is a dict of the fields and `mask`, which is
        false for rows that only fill it up.
        """
        config = self.place.config
        if not config.data.path:
            raise ConfigError("data.path is missing: session.data needs a data set")
        builder = self._parts.data
        if split in ("train", config.data.train_split):
            return builder.training()
        if split in ("val", config.data.val_split):
            feed = builder.evaluation()
        else:
            path, own = config.data.other_sets.get(split, (None, split))
            feed = builder.evaluation(own, path)
        if feed is None:
            raise ConfigError(f"session.data({split!r}): data.val_split is null, so there is none")
        made = Pass(feed)
        self._closing.callback(made.close)
        return made

    # --- the steps

    def steps(self, data: Any = None, *, max_steps: int | None = None) -> Iterator[tuple[int, Any]]:
        """Yield (step, batch) until `max_steps`; the loop makes one step with each batch.

        `step` counts from 0. It goes on from the last checkpoint with the exact next batch, saves
        when that is due, and ends the loop when the run is asked to stop.

        Args:
            data: What `session.data` returned, or anything that can be iterated: it begins anew at
                its end. Its position is exact if it has `state_dict`, as torchdata's
                StatefulDataLoader; else what was used is read again. None: the loop makes its own
                data, and `batch` is None.
            max_steps: The last step; None is `train.max_steps`.

        Raises:
            LoopError: It is entered twice, or the loop has left it before its end.
            HealthError: A logged number is not finite.
        """
        if self._entered:
            raise LoopError(
                "session.steps was entered twice: a run has one loop over its steps; go through "
                "other data within a step"
            )
        max_steps = max_steps if max_steps is not None else self.place.config.train.max_steps
        if not isinstance(max_steps, int) or max_steps < 1:
            raise LoopError(
                f"session.steps: max_steps={max_steps}: give the number of steps, at least 1, or "
                "train.max_steps"
            )
        self._entered = True
        return self._steps(data, max_steps)

    def _steps(self, data: Any, max_steps: int) -> Iterator[tuple[int, Any]]:
        if isinstance(data, Pass):
            raise LoopError(
                "session.steps: these are the samples of a split, each once; give the "
                "training split: session.data('train')"
            )
        place, mesh, config = self.place, self._parts.mesh, self.place.config
        feed = data if isinstance(data, DevicePrefetcher) else OwnFeed(data, self.world_size)
        if isinstance(feed, OwnFeed) and feed.batches is not None:
            self._kept.add(_DATA, feed.batches, each_rank=True)
        around = Around(place, mesh, self._models, self._optimizers)
        around.checkpointer.more = self._kept
        logged = Logged(mesh, around.health)
        parts: list[Part] = [self._kept, logged, self._ending, *patience_of(config.train)]
        parts += parts_of_user(config.hooks, config.seed, place.tracker) if config.hooks else []
        samples = not isinstance(feed, OwnFeed)
        given = feed, max_steps, self._parts.precision, parts
        made = around.steps(*given, counts_samples=samples)
        self._stepping, self._logged = made, logged
        self._closing.enter_context(made.closing())
        seed_generators(config.seed + 1 + mesh.dp_rank, of_torch=config.seed + 1 + mesh.stream)
        for step, batch in made.steps():
            for model in self._models.values():
                model.begin_step()
            yield step, batch
            own = logged.own()
            total, _ = made.exchange.reduce(own)
            logged.judge(own, total)
        if made.outcome is None or not made.outcome.finished:
            raise Stopped
        if self.is_main:
            self._say_what_was_not_logged(made.metrics)

    def _say_what_was_not_logged(self, logged: Mapping[str, float]) -> None:
        """Warn of a metric by which the run was to decide, if the loop has logged none such."""
        stopping, best = self.place.config.train.early_stopping, self.place.config.checkpoint.best
        for key, name in (
            ("train.early_stopping.metric", stopping.metric),
            ("checkpoint.best", best),
        ):
            if name is not None and name not in logged:
                log.warning(
                    "%s=%s was never logged, so it has decided nothing; the run has %s",
                    *(key, name, ", ".join(logged)),
                )

    def log(self, metrics: Mapping[str, Number | tuple[Number, Number]]) -> None:
        """Log metrics of this step.

        A value is a number or a tensor of one, or a pair of a sum and a count: then the metric is
        the mean over all ranks of what they count. Those of the group `train/` are means over the
        steps since the last report (`train.log_every`); others belong to this step, such as
        `val/accuracy`. All ranks log the same names in the same steps. A number that is not finite
        ends the run, as `train.nonfinite` says.
        """
        self._within_a_step("log")
        assert self._logged is not None
        self._logged.add(metrics)

    def end(self, reason: str) -> None:
        """End the run after this step, before `max_steps`, as finished; `reason` is for people."""
        self._within_a_step("end")
        self._ending.ask(reason)

    # --- for the engine

    @contextmanager
    def open(self) -> Iterator[Session]:
        """Be there for one loop, end what it has begun, and note how it has ended.

        A loop that has not made all of its steps is refused.
        """
        self.place.account.enter("startup")
        seed_generators(self.place.config.seed)  # what a loop draws before its steps
        with suppress(Stopped), self._closing, forks_end_here():
            yield self
        made = self._stepping
        if made is None:
            raise LoopError("the loop has returned without going through session.steps")
        if made.outcome is None:
            raise LoopError(
                f"the loop has left session.steps at step {made.step} of {made.max_steps}, by a "
                "break or a return; session.end(reason) ends a run early, on all ranks"
            )
        self.place.outcome = made.outcome

    def use(self, made: Stepping) -> None:
        """Take the steps of a loop within hpctrain."""
        self._stepping = made

    @cached_property
    def _parts(self) -> Parts:
        """The mesh, the precision and the data of the config; our own loop makes them itself."""
        return Parts(self.place.config, self.place.ranks, self.device)

    @cached_property
    def _kept(self) -> Kept:
        return Kept(self.rank)

    @cached_property
    def _ending(self) -> Ending:
        return Ending()

    def _within_a_step(self, method: str) -> None:
        if self._logged is None or self.outcome is not None:
            when = "the steps are over" if self.outcome is not None else "there is no step yet"
            raise LoopError(f"session.{method}: {when}; call it within session.steps")

    def _take(self, name: str, method: str) -> None:
        if self._stepping is not None:
            raise LoopError(
                f"session.{method}({name!r}): the steps have begun, and the checkpoint is loaded; "
                "make models and optimizers, and keep objects, before session.steps"
            )
        if not isinstance(name, str) or not name.isidentifier():
            raise LoopError(
                f"session.{method}({name!r}): a name has letters, digits and _, and begins with a "
                "letter"
            )
        if name in self._names:
            raise LoopError(f"session.{method}({name!r}): the session has that name already")
        self._names.add(name)
