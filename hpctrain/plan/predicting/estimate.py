"""What is predicted of one layout, as one line of the answer."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from hpctrain.config.schema import OptimizerConfig, PrecisionConfig
from hpctrain.estimates.memory_fit import on_gpu, on_host, worst
from hpctrain.estimates.optimizer_states import optimizer_states
from hpctrain.hardware import Hardware, Price
from hpctrain.plan.budget import Limits
from hpctrain.plan.inspecting.activations import Measured
from hpctrain.plan.inspecting.model_facts import ModelFacts
from hpctrain.plan.layouts import Divisible, Layout
from hpctrain.plan.memory import stored_bytes
from hpctrain.plan.predicting.calibration import Calibration
from hpctrain.plan.predicting.rank_memory import MemoryModel, RankMemory
from hpctrain.plan.predicting.timing import Efficiencies, StepTime, step_time


@dataclass(frozen=True)
class Estimate:
    """The prediction for a layout."""

    layout: Layout
    memory: RankMemory  # of the rank that needs most
    # None if the GPU's memory is unknown, or the activations are and the rest alone would fit.
    fits: bool | None
    time: StepTime | None  # of a step; None if a figure that it needs is unknown
    steps: int | None  # of the budget; None without one
    watts: float | None  # of all GPUs and nodes; None if unknown
    price: Price | None  # the one that counts; None if unknown
    spot: Price | None  # where capacity may be taken away; None if unknown or the user's own
    tokens: int  # of a sample
    reason: str = ""
    tight: bool = False  # it fits, but less than the margin of `memory_fit` stays free
    room: str = ""  # why it is tight, or does not fit

    @property
    def gpu_hours(self) -> float | None:
        """The GPU-hours of the budget."""
        if self.time is None or self.steps is None:
            return None
        return self.steps * self.time.step_s * self.layout.ranks / 3600

    @property
    def hours(self) -> float | None:
        """The hours of the budget on the clock."""
        return None if self.gpu_hours is None else self.gpu_hours / self.layout.ranks

    @property
    def bill(self) -> tuple[float | None, float | None, str]:
        """Hours, cost and its currency, as `Limits` compares them."""
        return self.hours, self.cost(self.price), self.price.currency if self.price else ""

    def cost(self, price: Price | None) -> float | None:
        """Return what the budget costs at a price."""
        if self.gpu_hours is None or price is None:
            return None
        return self.gpu_hours * price.amount

    @property
    def samples_per_s(self) -> float | None:
        """The samples of all ranks in a second."""
        return None if self.time is None else self.layout.batch.global_size / self.time.step_s

    @property
    def tokens_per_s_per_gpu(self) -> float | None:
        """The tokens of a rank in a second."""
        rate = self.samples_per_s
        return rate * self.tokens / self.layout.ranks if rate and self.tokens else None

    def as_json(self) -> dict[str, Any]:
        """Return the entry of `--json`: bytes, seconds and plain numbers; null is unknown."""
        hours, time = self.gpu_hours, self.time
        return {
            "overrides": list(self.layout.overrides),
            "ranks": self.layout.ranks,
            "nodes": self.layout.nodes,
            "fits": self.fits,
            "tight": self.tight,
            "memory": asdict(self.memory),
            "step_s": time and time.step_s,
            "samples_per_s": self.samples_per_s,
            "tokens_per_s_per_gpu": self.tokens_per_s_per_gpu,
            "mfu": time and time.mfu,
            "bubble": time and time.bubble,
            "comm_s": time and time.comm_s,
            "exposed_comm_s": time and time.exposed_comm_s,
            "hours": self.hours,
            "gpu_hours": hours,
            "kwh": self.hours and self.watts and self.hours * self.watts / 1000,
            "cost": self.cost(self.price),
            "spot_cost": self.cost(self.spot),
            "currency": self.price and self.price.currency,
            "reason": self.reason,
        }


class Estimator:
    """Predicts layouts of one model.

    `activations` are those of a sample, by `train.activation_checkpointing`. `calibration` is what
    measured runs say of the times; None takes the efficiencies alone.
    """

    def __init__(
        self,
        facts: ModelFacts,
        memory: MemoryModel,
        activations: Measured,
        blocks: int,
    ) -> None:
        self.facts, self._memory, self.activations = facts, memory, activations
        self._blocks, self.efficiencies, self.limits = blocks, Efficiencies(), Limits()
        self.steps: int | None = None
        self.calibration: Calibration | None = None

    @property
    def modes(self) -> tuple[str, ...]:
        """The modes of activation checkpointing that the model can have."""
        return ("none", "selective", "full") if self._blocks else ("none",)

    @property
    def divisible(self) -> Divisible:
        """What can be divided of the model and its samples."""
        return Divisible(self.facts.experts, self.facts.tokens if self.facts.context else 0)

    def least(self, precision: PrecisionConfig, optimizer: OptimizerConfig, ranks: int) -> float:
        """Return the bytes below which no layout on these ranks can go: the divided states."""
        stored = stored_bytes(precision)
        trained = stored * (1 + optimizer_states(optimizer)) * self.facts.trainable
        return (stored * (self.facts.parameters - self.facts.adapted) + trained) / ranks

    def of(self, layout: Layout, hardware: Hardware | None) -> Estimate:
        """Return the prediction for a layout; a ConfigError if the model cannot be divided so."""
        memory = self._memory.of(layout, hardware)
        time = None
        if hardware is not None:
            time = step_time(
                *(layout, self.facts, self.activations["none"]),
                *(self._blocks, hardware, self.efficiencies),
            )
        if self.calibration is not None:
            time = None if time is None else self.calibration.time(time)
            memory = self.calibration.bytes(memory)
        price = hardware.price_per_hour if hardware else None
        limit, launch = hardware.memory_bytes if hardware else None, layout.config.launch
        ranks = launch.tasks_per_node
        fit = worst(
            on_gpu(memory.total, limit, complete=memory.activations is not None),
            on_host(ranks * memory.host, ranks, launch.mem_gb),
        )
        return Estimate(
            layout,
            memory,
            fit.possible,
            time,
            self.steps,
            _watts(layout, hardware),
            price,
            hardware.spot if hardware else None,
            self.facts.tokens,
            tight=fit.tight,
            room=fit.reason,
        )


def _watts(layout: Layout, hardware: Hardware | None) -> float | None:
    if hardware is None or (hardware.power_w is None and hardware.node_power_w is None):
        return None
    of_nodes = layout.nodes * (hardware.node_power_w or 0.0)
    return layout.ranks * (hardware.power_w or 0.0) + of_nodes


def speed(estimate: Estimate) -> float:
    """Return the step time for sorting: what is unknown comes last."""
    return estimate.time.step_s if estimate.time else math.inf
