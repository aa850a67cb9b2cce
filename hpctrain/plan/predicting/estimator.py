"""Predicts layouts of one model: its facts, what they take, and how long."""

import math
from inspect import signature
from typing import Any, Self

from torch import nn

from hpctrain.config.schema import Config
from hpctrain.estimates.memory_fit import Fit, on_gpu, on_host, staged_bytes, worst
from hpctrain.estimates.optimizer_states import optimizer_states
from hpctrain.hardware import Hardware
from hpctrain.parallel.precision import DTYPES
from hpctrain.plan.budget import Budget, Limits
from hpctrain.plan.failures import Failures
from hpctrain.plan.inspecting.activations import Measured
from hpctrain.plan.inspecting.model_facts import (
    ModelFacts,
    build_of,
    build_on_meta,
    explained,
    facts_of,
)
from hpctrain.plan.layouts import Divisible, Layout
from hpctrain.plan.memory import stored_bytes
from hpctrain.plan.predicting.calibration import Calibration
from hpctrain.plan.predicting.estimate import Estimate
from hpctrain.plan.predicting.rank_memory import MemoryModel
from hpctrain.plan.predicting.timing import Efficiencies, step_time
from hpctrain.shards.types import Batch
from hpctrain.tasks.task import check_arguments


class Estimator:
    """Predicts layouts of one model, which is on the meta device.

    `activations` are those of a sample, by `train.activation_checkpointing`. Without `calibration`
    the times follow from the efficiencies alone; `failures` are those of the nodes, or left out.
    """

    def __init__(self, model: nn.Module, facts: ModelFacts, activations: Measured) -> None:
        self.facts, self.activations = facts, activations
        self._memory = MemoryModel(model, facts, activations)
        self.efficiencies, self.limits = Efficiencies(), Limits()
        self.budget = Budget(None, "no budget")
        self.failures: Failures | None = None
        self.calibration: Calibration | None = None

    @classmethod
    def of_config(cls, config: Config, task: Any, sample: Batch) -> tuple[Self, nn.Module]:
        """Return that of a config's model, and the model; a ConfigError if they do not fit."""
        blocks = config.parallel.blocks
        build = build_of(config.model, config.train.lora, config.optimizer, blocks)
        model = build_on_meta(build)
        check_arguments([*signature(model.forward).parameters], getattr(task, "arguments", ()))
        with explained("plan: the model"):
            facts = facts_of(model, task, sample, blocks)
        formats = {"bf16": DTYPES["bf16"], "fp8": DTYPES["bf16"], "fp16": DTYPES["fp16"]}
        dtype = formats.get(config.precision.compute)
        measured = Measured(build, task, sample, dtype, config.train, blocks)
        return cls(model, facts, measured), model

    @property
    def modes(self) -> tuple[str, ...]:
        """The modes of activation checkpointing that the model can have."""
        return ("none", "selective", "full") if self.facts.blocks else ("none",)

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
        model = facts.trainable if train.lora.patterns else facts.parameters
        elements = model * (1 + (train.ema is not None))
        elements += optimizer_states(config.optimizer) * facts.trainable
        return stored_bytes(config.precision) * elements

    def of(self, layout: Layout, hardware: Hardware | None) -> Estimate:
        """Return the prediction for a layout; a ConfigError if the model cannot be divided so."""
        memory, time, losses = self._memory.of(layout, hardware), None, None
        if hardware is not None:
            about = layout, self.facts, self.activations["none"]
            time = step_time(*about, hardware, self.efficiencies)
        if self.calibration is not None:
            time = time and self.calibration.time(time)
            memory = self.calibration.bytes(memory)
        saves, saved = layout.config.checkpoint, self.checkpoint_bytes(layout.config)
        limit, launch = hardware.memory_bytes if hardware else None, layout.config.launch
        ranks = launch.tasks_per_node
        copy, kept = saved / layout.nodes, ranks * memory.host
        staged = staged_bytes(copy, kept, ranks, saves.staging_gb, launch.mem_gb)
        if self.failures is not None and time is not None:
            by_time = math.ceil(saves.every_s / time.step_s) if saves.every_s else None
            given = min(filter(None, (saves.every_steps, by_time)), default=None)
            losses = self.failures.losses(
                *(layout.nodes, saved, time.step_s, self.budget.steps, given),
                background=staged > 0,
            )
        fit = worst(
            on_gpu(memory.total, limit, complete=memory.activations is not None),
            on_host(kept + staged, ranks, launch.mem_gb) if kept else Fit(True),
        )
        run = self.budget, hardware, self.facts.tokens, losses
        return Estimate(layout, memory, fit, time, *run, staged=staged)
