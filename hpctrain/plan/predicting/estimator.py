"""Predicts layouts of one model: its facts, what they take, and how long."""

import contextlib
import math
from collections.abc import Sequence
from inspect import signature
from typing import Any, Self

from torch import nn

from hpctrain.config.schema import Config
from hpctrain.errors import ConfigError
from hpctrain.estimates.measured_run import MeasuredRun
from hpctrain.estimates.memory_fit import Fit, on_gpu, on_host, staged_bytes, worst
from hpctrain.estimates.optimizer_states import optimizer_states
from hpctrain.hardware import Hardware
from hpctrain.parallel.precision import DTYPES
from hpctrain.parallel.preparing.blocks import find_blocks
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
from hpctrain.plan.predicting.calibration import Calibration, calibrated, layout_of
from hpctrain.plan.predicting.efficiencies import Efficiencies
from hpctrain.plan.predicting.estimate import Estimate
from hpctrain.plan.predicting.rank_memory import MemoryModel
from hpctrain.plan.predicting.timing import step_time
from hpctrain.shards.types import Batch
from hpctrain.tasks.task import check_arguments


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

    @classmethod
    def of_config(cls, config: Config, task: Any, sample: Batch) -> tuple[Self, nn.Module]:
        """Return the estimator of a config's model, and this model without memory.

        It raises a ConfigError if the task and the sample do not fit.
        """
        build = build_of(config.model, config.train.lora, config.optimizer, config.parallel.blocks)
        model = build_on_meta(build)
        check_arguments([*signature(model.forward).parameters], getattr(task, "arguments", ()))
        with explained("plan: the model"):
            facts = facts_of(model, task, sample)
        compute = {"bf16": "bf16", "fp8": "bf16", "fp16": "fp16"}.get(config.precision.compute)
        dtype = None if compute is None else DTYPES[compute]
        activations = Measured(build, task, sample, dtype, config.train)
        blocks = 0
        with contextlib.suppress(ConfigError):
            blocks = len(find_blocks(model, config.parallel.blocks))
        return cls(facts, MemoryModel(model, facts, activations), activations, blocks), model

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
        limit, launch = hardware.memory_bytes if hardware else None, layout.config.launch
        ranks, saves = launch.tasks_per_node, layout.config.checkpoint
        whole = self.checkpoint_bytes(layout.config)
        copy, kept = whole / layout.nodes, ranks * memory.host
        staged = staged_bytes(copy, kept, ranks, saves.staging_gb, launch.mem_gb)
        losses = None
        if self.failures is not None and time is not None:
            by_time = math.ceil(saves.every_s / time.step_s) if saves.every_s else None
            losses = self.failures.losses(
                *(layout.nodes, whole, time.step_s, self.budget.steps),
                min(filter(None, (saves.every_steps, by_time)), default=None),
                background=staged > 0,
            )
        fit = worst(
            on_gpu(memory.total, limit, complete=memory.activations is not None),
            on_host(kept + staged, ranks, launch.mem_gb) if kept else Fit(True),
        )
        about = (self.budget, hardware, self.facts.tokens, losses)
        return Estimate(layout, memory, fit, time, *about, staged=staged)


def calibration_of(
    measured: Sequence[tuple[Estimator, MeasuredRun]], hardware: Hardware
) -> Calibration:
    """Return what measured runs say, beside what is predicted for them."""
    estimates = [estimator.of(layout_of(run), hardware) for estimator, run in measured]
    runs, times = [run for _, run in measured], [one.time for one in estimates if one.time]
    if len(times) < len(runs):
        raise ConfigError(
            f"--from-run: the FLOPs of the runs, or a figure of hardware={hardware.name}, are "
            "unknown, so there is nothing to compare their times with"
        )
    return calibrated(runs, times, [one.memory for one in estimates])
