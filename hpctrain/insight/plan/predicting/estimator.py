"""Predicts layouts of one model: what they take, how long, and at what cost."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from inspect import signature
from typing import Any, Self

from torch import nn

from hpctrain.base.units import ELEMENT_BYTES
from hpctrain.config.schema import Config
from hpctrain.data.shards.types import Batch
from hpctrain.engine.parallel.precision import DTYPES
from hpctrain.engine.tasks.task import check_arguments
from hpctrain.insight.estimates.hardware import Hardware
from hpctrain.insight.plan.budget import Budget
from hpctrain.insight.plan.inspecting.activations import MeasuredActivations
from hpctrain.insight.plan.inspecting.model_facts import (
    ModelFacts,
    build_of,
    build_on_meta,
    explained,
    facts_of,
)
from hpctrain.insight.plan.layouts import Layout
from hpctrain.insight.plan.memory import Fit, margin_of, on_gpu, on_host, worst
from hpctrain.insight.plan.predicting.accuracy import is_covered, uncompared
from hpctrain.insight.plan.predicting.rank_memory import MemoryModel, RankMemory
from hpctrain.insight.plan.predicting.timing import Efficiencies, StepTime, step_time

# A layout that was compared with nothing published is ranked as if its steps took so many times as
# long: predictions of the largest class, dense bf16, are 11 % off in the median, a tenth over 22 %.
_SLOWER = 1.15


@dataclass(frozen=True)
class Estimate:
    """The prediction for a layout."""

    layout: Layout
    memory: RankMemory  # of the rank that needs most
    # Unknown if the GPU's memory is, or the activations are and the rest alone would fit.
    fit: Fit
    time: StepTime | None  # of a step; None if a figure that it needs is unknown
    budget: Budget
    hardware: Hardware
    tokens: int  # of a sample

    @property
    def fits(self) -> bool | None:
        """Whether it has room, even if it is tight; None if that is unknown."""
        return self.fit.possible

    @property
    def has_room(self) -> bool:
        """Whether as much stays free as it should; what is unknown counts as if it did."""
        return self.fits is not False and not self.fit.tight

    @property
    def order(self) -> tuple[bool, float]:
        """What sorts layouts, fastest first: those of unknown time follow as they were listed.

        One that was compared with nothing published stands where it would if it were slower.
        """
        if self.time is None:
            return True, 0.0
        return False, self.time.step_s * (_SLOWER if self.uncompared else 1.0)

    @property
    def uncompared(self) -> str:
        """What of the layout no published run had that was compared, or ""."""
        return uncompared(self.layout)

    @property
    def assumed(self) -> bool:
        """Whether the speed is assumed: no published run on such a GPU was compared."""
        return not (self.time is None or is_covered(self.hardware))

    @property
    def bill(self) -> dict[str, Any]:
        """What the budget takes on the clock and of GPUs, and what it costs; None is unknown."""
        hours, power = None, self.hardware.power_w
        if self.time is not None and self.budget.steps is not None:
            hours = self.budget.steps * self.time.step_s / 3600
        gpu_hours = hours and hours * self.layout.allocated
        price, spot = self.hardware.price_per_hour, self.hardware.spot
        return {
            "hours": hours,
            "gpu_hours": gpu_hours,
            "kwh": hours and power and hours * self.layout.ranks * power / 1000,
            "cost": price and gpu_hours and gpu_hours * price.amount,
            "spot_cost": spot and gpu_hours and gpu_hours * spot.amount,
            "currency": price and price.currency,
        }

    def as_json(self) -> dict[str, Any]:
        """Return the entry of `--json`: bytes, seconds and plain numbers; null is unknown."""
        of_step = ("step_s", "mfu", "bubble", "comm_s", "exposed_comm_s")
        rate = self.time and self.layout.batch.global_size / self.time.step_s
        return {
            "layout": self.layout.name,
            "overrides": [*self.layout.overrides],
            "ranks": self.layout.ranks,
            "nodes": self.layout.nodes,
            "fits": self.fits,
            "tight": self.fit.tight,
            "compared": not self.uncompared,
            "gpu_compared": not self.assumed,
            "memory": asdict(self.memory),
            **{name: self.time and getattr(self.time, name) for name in of_step},
            "steps": self.budget.steps,
            "samples_per_s": rate,
            "tokens_per_s_per_gpu": rate * self.tokens / self.layout.ranks
            if rate and self.tokens
            else None,
            **self.bill,
            "reason": self.fit.reason,
        }


def uncompared_line(estimates: Iterable[Estimate]) -> str:
    """Return the line that explains the mark of layouts that were compared with nothing, or ""."""
    parts = {part for one in estimates for part in one.uncompared.split(" and ") if part}
    told = f"no published run with {' or '.join(sorted(parts))} was compared; such layouts are "
    return f"{told}ranked as if their steps took {_SLOWER - 1:.0%} longer" if parts else ""


class Estimator:
    """Predicts layouts of one model, which is on the meta device.

    `activations` are those of a sample, by `train.activation_checkpointing`.
    """

    def __init__(
        self, model: nn.Module, facts: ModelFacts, activations: MeasuredActivations
    ) -> None:
        self.model, self.facts, self.activations = model, facts, activations
        self._memory = MemoryModel(model, facts, activations)
        self.efficiencies = Efficiencies()
        self.budget = Budget(None, "no budget")

    @classmethod
    def of_training(cls, training: Config, task: Any, sample: Batch) -> Self:
        """Return that of its model; a ConfigError if the task or the sample do not fit."""
        blocks = training.parallel.blocks
        build = build_of(training)
        model = build_on_meta(build)
        check_arguments([*signature(model.forward).parameters], getattr(task, "arguments", ()))
        with explained("plan: the model"):
            facts = facts_of(model, task, sample, blocks)
        half = {"bf16": DTYPES["bf16"], "fp8": DTYPES["bf16"], "fp16": DTYPES["fp16"]}
        dtype = half.get(training.precision.compute)
        measured = MeasuredActivations(build, task, sample, dtype, blocks)
        return cls(model, facts, measured)

    def least(self, training: Config, ranks: int) -> float:
        """Return the bytes below which no layout on these ranks can go: the divided states."""
        stored, facts = ELEMENT_BYTES[training.precision.params], self.facts
        trained = stored * (1 + training.optimizer.states) * facts.trainable
        return (stored * (facts.parameters - facts.adapted) + trained) / ranks

    def of(self, layout: Layout, hardware: Hardware) -> Estimate:
        """Return the prediction for a layout; a ConfigError if the model cannot be divided so."""
        memory = self._memory.of(layout, hardware)
        about = layout, self.facts, self.activations["none"]
        time = step_time(*about, hardware, self.efficiencies)
        launch, ranks = layout.training.launch, layout.training.launch.tasks_per_node
        complete, margin = memory.activations is not None, margin_of(layout.training.train)
        fit = worst(
            on_gpu(memory.total, hardware.memory_bytes, complete=complete, margin=margin),
            on_host(ranks * memory.host, ranks, launch.mem_gb),
        )
        return Estimate(layout, memory, fit, time, self.budget, hardware, self.facts.tokens)
