"""The stages of a pipeline: each is the model, without the modules that other stages have.

    whole     embed  layers.0  layers.1  layers.2  layers.3  norm  head
    stage 0   embed  layers.0  layers.1     -         -       -     -
    stage 1     -       -         -      layers.2  layers.3  norm  head

A module that is missing is replaced by one that returns its first argument. So the names of
parameters are those of the whole model, and the forward function of the model runs every stage.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

from torch import nn

from hpctrain.base.errors import ConfigError
from hpctrain.config.rules.degrees import block_problem
from hpctrain.config.schema import ParallelConfig
from hpctrain.config.schema.parallel import SCHEDULES
from hpctrain.engine.layers.plan import Plan
from hpctrain.engine.layers.ties import ties


class Absent(nn.Module):
    """It stands for a module of another stage, and returns its first argument."""

    def forward(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        """Return `x`."""
        return x


class United(nn.Module):
    """The modules of several stages under the names that they have in the whole model.

    Each has the same class; what is absent in one may be in another.
    """

    def __init__(self, stages: Sequence[nn.Module]) -> None:
        super().__init__()
        self._roots = tuple(stages)  # no submodules, so that no name has a prefix
        for stage in stages:
            for name, parameter in stage.named_parameters(recurse=False):
                self.register_parameter(name, parameter)
            for name, buffer in stage.named_buffers(recurse=False):
                self.register_buffer(name, buffer, name not in stage._non_persistent_buffers_set)
        for name in dict.fromkeys(name for stage in stages for name, _ in stage.named_children()):
            found = [stage.get_submodule(name) for stage in stages]
            present = [module for module in found if not isinstance(module, Absent)]
            if present:
                self.add_module(name, present[0] if len(present) == 1 else United(present))

    def train(self, mode: bool = True) -> United:
        """Change the mode of the stages, too."""
        for root in self._roots:
            root.train(mode)
        self.training = mode
        return self


def numbers_of(schedule: str, pp: int, pp_rank: int) -> list[int]:
    """Return the numbers of the stages that rank `pp_rank` of `pp` has, in their order."""
    if schedule == "zbv":
        return [pp_rank, 2 * pp - 1 - pp_rank]
    return [pp_rank + pp * i for i in range(SCHEDULES[schedule])]


def rank_of(number: int, schedule: str, pp: int) -> int:
    """Return which rank of `pp` has a stage."""
    return next(rank for rank in range(pp) if number in numbers_of(schedule, pp, rank))


def block_counts(model: nn.Module, plan: Plan, parallel: ParallelConfig, pp: int) -> list[int]:
    """Return how many of the model's blocks each stage has."""
    kind, blocks = type(model).__name__, model.get_submodule(plan.blocks)
    _check(model, plan, pp)
    costs = [_size(block) for block in blocks.children()]
    stages = pp * SCHEDULES[parallel.pipeline.schedule]
    what = f"{kind} has {len(costs)} blocks ({plan.blocks})"
    if problem := block_problem(what, len(costs), parallel, pp):
        raise ConfigError(problem)
    if parallel.pipeline.blocks is not None:
        return parallel.pipeline.blocks
    first, last = (
        sum(_size(model.get_submodule(name)) for name in names) for names in (plan.first, plan.last)
    )
    return divide(costs, first, last, stages)


def divide(costs: Sequence[int], first: int, last: int, stages: int) -> list[int]:
    """Return the sizes of successive parts so that the most expensive part costs least.

    `costs` are those of the blocks, at least as many as stages, such as their numbers of
    parameters; `first` and `last` are what the first and the last part cost beside them.
    """
    sums, n = [0, *accumulate(costs)], len(costs)
    # The best way to put the first `end` blocks into the parts so far: its largest cost, the sum of
    # the squares of all costs, which tells equally good ways apart, and the sizes.
    best: dict[int, tuple[int, int, tuple[int, ...]]] = {0: (0, 0, ())}
    for stage in range(stages):
        extra = (first if stage == 0 else 0) + (last if stage == stages - 1 else 0)
        ways: dict[int, tuple[int, int, tuple[int, ...]]] = {}
        for end in range(stage + 1, n - (stages - stage - 1) + 1):
            ways[end] = min(
                (max(worst, cost), squares + cost**2, (*sizes, end - start))
                for start, (worst, squares, sizes) in best.items()
                if start < end
                for cost in [sums[end] - sums[start] + extra]
            )
        best = ways
    return list(best[n][2])


def cut(model: nn.Module, plan: Plan, counts: Sequence[int], number: int) -> None:
    """Replace the modules that a stage does not have, in place."""
    start = sum(counts[:number])
    names = [name for name, _ in model.get_submodule(plan.blocks).named_children()]
    absent = [
        f"{plan.blocks}.{name}"
        for i, name in enumerate(names)
        if not start <= i < start + counts[number]
    ]
    absent += plan.first if number > 0 else ()
    absent += plan.last if number < len(counts) - 1 else ()
    for name in absent:
        model.set_submodule(name, Absent())


def present(model: nn.Module, names: Sequence[str]) -> Iterator[nn.Module]:
    """Yield those of the modules of a whole model, given by their names, that a stage has."""
    modules = dict(model.named_modules())
    for name in names:
        if name in modules and not isinstance(modules[name], Absent):
            yield modules[name]


def _check(model: nn.Module, plan: Plan, pp: int) -> None:
    kind = type(model).__name__
    for name, others in ties(model):
        raise ConfigError(
            f"parallel.pp={pp}: {name} and {others[0]} of {kind} are one parameter, which stages "
            "cannot share; set model.tied=false (tie_word_embeddings: false for a model of "
            "transformers)"
        )
    known = (*plan.first, plan.blocks, *plan.last)
    for name, _ in model.named_parameters():
        if not any(name.startswith(f"{module}.") for module in known):
            raise ConfigError(
                f"parallel.pp={pp}: the plan of {kind} puts {name} in no stage; it names "
                f"{', '.join(known)}"
            )


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
