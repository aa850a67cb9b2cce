"""What is predicted of one layout, as one line of the answer."""

import math
from dataclasses import asdict, dataclass
from typing import Any

from hpctrain.config.schema import Config
from hpctrain.estimates.memory_fit import on_gpu, on_host, worst
from hpctrain.estimates.optimizer_states import optimizer_states
from hpctrain.hardware import Hardware, Price
from hpctrain.plan.budget import Budget, Limits
from hpctrain.plan.failures import Failures, Losses
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
    budget: Budget
    watts: float | None  # of all GPUs and nodes; None if unknown
    price: Price | None  # the one that counts; None if unknown
    spot: Price | None  # where capacity may be taken away; None if unknown or the user's own
    tokens: int  # of a sample
    losses: Losses | None = None  # by failures of nodes, which the hours have; None if not asked
    reason: str = ""
    tight: bool = False  # it fits, but less than the margin of `memory_fit` stays free
    room: str = ""  # why it is tight, or does not fit

    @property
    def overrides(self) -> list[str]:
        """What to add to the command line."""
        losses, given = self.losses, [*self.layout.overrides]
        if losses is None or losses.every_steps == losses.every_steps_as_given:
            return given
        return [*given, f"checkpoint.every_steps={losses.every_steps}"]

    @property
    def _whole_step_s(self) -> float | None:
        """The seconds of a step with its part of what failures and saves take."""
        part = 1 - self.losses.lost if self.losses else 1.0
        return None if self.time is None else self.time.step_s / part

    @property
    def steps(self) -> int | None:
        """The steps of the budget; None if they are unknown."""
        return self.budget.steps_of(self._whole_step_s, self.layout.ranks)

    @property
    def hours(self) -> float | None:
        """The hours of the budget on the clock."""
        if self._whole_step_s is None or self.steps is None:
            return None
        return self.steps * self._whole_step_s / 3600

    @property
    def gpu_hours(self) -> float | None:
        """The GPU-hours of the budget."""
        return None if self.hours is None else self.hours * self.layout.ranks

    @property
    def kwh(self) -> float | None:
        """The energy of the budget."""
        return self.hours and self.watts and self.hours * self.watts / 1000

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
        of_step = ("step_s", "mfu", "bubble", "comm_s", "exposed_comm_s")
        own = ("samples_per_s", "tokens_per_s_per_gpu", "steps", "hours", "gpu_hours", "kwh")
        return {
            "overrides": self.overrides,
            "ranks": self.layout.ranks,
            "nodes": self.layout.nodes,
            "fits": self.fits,
            "tight": self.tight,
            "memory": asdict(self.memory),
            **{name: self.time and getattr(self.time, name) for name in of_step},
            **{name: getattr(self, name) for name in own},
            "cost": self.cost(self.price),
            "spot_cost": self.cost(self.spot),
            "currency": self.price and self.price.currency,
            "failures": self.losses and vars(self.losses),
            "reason": self.reason,
        }


class Estimator:
    """Predicts layouts of one model.

    `activations` are those of a sample, by `train.activation_checkpointing`. `calibration` is what
    measured runs say of the times; None takes the efficiencies alone. `failures` are those of the
    nodes; None leaves them out.
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
        self.budget = Budget(None, "no budget")
        self.failures: Failures | None = None
        self.calibration: Calibration | None = None

    @property
    def modes(self) -> tuple[str, ...]:
        """The modes of activation checkpointing that the model can have."""
        return ("none", "selective", "full") if self._blocks else ("none",)

    @property
    def divisible(self) -> Divisible:
        """What can be divided of the model and its samples."""
        return Divisible(self.facts.experts, self.facts.tokens if self.facts.context else 0)

    def least(self, config: Config, ranks: int) -> float:
        """Return the bytes below which no layout on these ranks can go: the divided states."""
        stored, facts = stored_bytes(config.precision), self.facts
        trained = stored * (1 + optimizer_states(config.optimizer)) * facts.trainable
        return (stored * (facts.parameters - facts.adapted) + trained) / ranks

    def checkpoint_bytes(self, config: Config) -> float:
        """Return the bytes of a checkpoint: with adapters (LoRA) it is without the base."""
        facts, train = self.facts, config.train
        models = (facts.trainable if train.lora.patterns else facts.parameters) * (
            1 + (train.ema is not None)
        )
        states = optimizer_states(config.optimizer) * facts.trainable
        return stored_bytes(config.precision) * (models + states)

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
        losses = None
        if self.failures is not None and time is not None:
            losses = self.failures.losses(
                *(layout.nodes, self.checkpoint_bytes(layout.config), time.step_s),
                *(self.budget.steps, layout.config.checkpoint.every_steps),
            )
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
            self.budget,
            _watts(layout, hardware),
            price,
            hardware.spot if hardware else None,
            self.facts.tokens,
            losses,
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
