"""Puts the answer of `plan` together: the model, the layouts and the hardware."""

from dataclasses import dataclass, replace
from typing import Any

from hpctrain.base.errors import ConfigError
from hpctrain.base.units import GIB
from hpctrain.config.schema import Config
from hpctrain.engine.building.instantiate import instantiate
from hpctrain.engine.distributed.devices import CONTEXT_BYTES
from hpctrain.insight.estimates.hardware import Hardware, of_section
from hpctrain.insight.flops.flops import COUNTED
from hpctrain.insight.plan.budget import budget_of
from hpctrain.insight.plan.inspecting.sample_shape import (
    of_data,
    of_shape,
    parse_shape,
    samples_of_epoch,
)
from hpctrain.insight.plan.layouts import of_command_line
from hpctrain.insight.plan.memory import margin_of
from hpctrain.insight.plan.predicting.accuracy import accuracy
from hpctrain.insight.plan.predicting.estimator import Estimate, Estimator, uncompared_line
from hpctrain.insight.plan.predicting.rank_memory import GAPS
from hpctrain.insight.plan.ranking import Kind, Ranking, by_cost, on, rank, sizes_of, smallest


@dataclass(frozen=True)
class Query:
    """What the command line asks for."""

    training: Config
    hardware: Hardware | None
    nodes: list[int] | None  # None leaves the numbers open
    shape: str | None  # of `--sample-shape`; None takes the data set's
    budget: str | None  # of `--budget`
    named: bool  # whether the command line names a layout
    per_node: int = 0  # the ranks of a node that are asked for; 0 takes those of the hardware


_SIZES = ("parameters", "trainable", "embedding", "active")


@dataclass(frozen=True)
class Answer:
    """What `plan` tells."""

    asked: Query
    estimator: Estimator
    named: Estimate | None
    ranking: Ranking
    kinds: list[Kind]  # with the smallest number of GPUs that is enough of each

    @property
    def layouts(self) -> list[Estimate]:
        """All estimates; that of the command line is the first, and occurs once."""
        if self.named is None:
            return self.ranking.best
        same = self.named.layout.divided
        return [self.named, *(one for one in self.ranking.best if one.layout.divided != same)]

    @property
    def fits(self) -> bool | None:
        """Whether the layout of the command line, or else any other, is possible; None: unknown."""
        if self.named is not None:
            return self.named.fits
        found = {estimate.fits for estimate in self.ranking.best}
        return True if True in found else None if None in found else False

    def as_json(self) -> dict[str, Any]:
        """Return the object that `--json` prints."""
        facts, flops, layouts = self.estimator.facts, self.estimator.facts.flops, self.layouts
        per_token = flops.training / flops.tokens if flops and flops.tokens else None
        operations = {"flops_per_sample": flops and flops.training, "flops_per_token": per_token}
        return {
            "model": {name: getattr(facts, name) for name in _SIZES} | operations,
            "layouts": [estimate.as_json() for estimate in layouts],
            "hardware": [
                {"name": kind.hardware.name}
                | (kind.best.as_json() if kind.best else {"fits": False, "reason": kind.why})
                for kind in self.kinds
            ],
            "assumptions": self.assumptions | {"excluded": self.ranking.excluded},
        }

    @property
    def assumptions(self) -> dict[str, Any]:
        """What the answer rests on."""
        estimator, training, hardware = self.estimator, self.asked.training, self.asked.hardware
        flops = estimator.facts.flops
        found: dict[str, Any] = {
            "kind": "all figures but the parameters are estimates",
            "budget": estimator.budget.text,
            "flops": COUNTED if flops else "unknown",
            "activations": "measured with tensors without memory"
            if estimator.activations["none"].exact
            else "unknown: the model can be called only with values, so they are left out",
        }
        if hardware is not None:
            margin = margin_of(training.train)
            found |= {
                "hardware": hardware.title,
                "allowance": f"{CONTEXT_BYTES / GIB:g} GiB of context and {GAPS:.0%} of gaps",
                "margin": f"what fits leaves {margin:.0%} of the GPU's memory free; tight leaves "
                "less",
                "prices": ", ".join(map(str, hardware.prices.values())) or "unknown",
                "efficiencies": str(estimator.efficiencies.on(hardware)),
            }
            found["unknown"] = ", ".join(hardware.missing) or "nothing of the hardware"
            found |= accuracy(estimator.facts, training, hardware)
        every = [*self.layouts, *(kind.best for kind in self.kinds if kind.best)]
        if line := uncompared_line(every):
            found["* behind a layout"] = line
        if any(one.assumed for one in every):
            found["* behind a GPU"] = (
                "its speed is assumed, for no published run on it was compared; such GPUs stand "
                "behind the others, whatever they cost"
            )
        return found


def answer(asked: Query, others: list[Hardware]) -> Answer:
    """Return the plan; a ConfigError if model, task, sample and layout do not fit."""
    training, hardware, shape = asked.training, asked.hardware, asked.shape
    named_nodes = training.launch.node_numbers.start
    if asked.named:  # an error of it comes before any work
        of_command_line(training, named_nodes)
    if hardware is not None and training.parallel.device != "cpu":
        _check_node(hardware, asked.per_node)
    task = instantiate("task", training.task)
    sample = of_data(training.data) if shape is None else of_shape(task, parse_shape(shape))
    estimator = Estimator.of_training(training, task, sample)
    samples = None if shape else samples_of_epoch(training.data)
    tokens = estimator.facts.tokens
    estimator.budget = budget_of(asked.budget, training.train, tokens, samples)
    any_kind = hardware or of_section({"title": "hardware that is not named"})
    assert estimator.activations["none"]  # a sample that does not fit is an error of its own
    named, ranking, per_node = None, Ranking([], {}), asked.per_node
    if asked.named or hardware is None:
        named = estimator.of(of_command_line(training, named_nodes), any_kind)
    if hardware is not None and (asked.nodes or not asked.named):
        ranking = rank(training, estimator, hardware, sizes_of(hardware, asked.nodes, per_node))
        if not ranking.best and asked.nodes is None:
            least = smallest(training, estimator, hardware, per_node)
            ranking = replace(ranking, best=[least.best] if least.best else [])
    kinds = by_cost(smallest(on(training, other), estimator, other) for other in others)
    return Answer(asked, estimator, named, ranking, kinds)


def _check_node(hardware: Hardware, per_node: int) -> None:
    """Raise a ConfigError if a node is to have more ranks than GPUs."""
    gpus = hardware.gpus_per_node
    if gpus and per_node > gpus:
        raise ConfigError(
            f"launch.tasks_per_node={per_node}: a node of hardware={hardware.name} has {gpus} "
            f"GPUs, and each rank needs one: use launch.tasks_per_node={gpus} and more "
            f"launch.nodes, or hardware.gpus_per_node={per_node} if yours have as many"
        )
