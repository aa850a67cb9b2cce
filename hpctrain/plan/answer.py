"""Puts the answer of `plan` together: the model, the layouts and the hardware."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from inspect import signature
from typing import Any

from torch import nn

from hpctrain.config.schema import Config
from hpctrain.console import Console
from hpctrain.errors import ConfigError
from hpctrain.estimates.measured_run import MeasuredRun
from hpctrain.hardware import Hardware, of_section
from hpctrain.job.building.instantiate import instantiate
from hpctrain.parallel.precision import DTYPES
from hpctrain.parallel.preparing.blocks import find_blocks
from hpctrain.parallel.preparing.initial import Build
from hpctrain.plan import printing
from hpctrain.plan.budget import Budget, Limits, budget_of
from hpctrain.plan.inspecting.activations import Activations, activations_of
from hpctrain.plan.inspecting.model_facts import (
    Layer,
    ModelFacts,
    build_of,
    build_on_meta,
    explained,
    facts_of,
    layers_of,
)
from hpctrain.plan.inspecting.sample_shape import of_data, of_shape, parse_shape, samples_of_epoch
from hpctrain.plan.layouts import Layout, of_command_line
from hpctrain.plan.loader_rate import LoaderRate, loader_rate
from hpctrain.plan.predicting.accuracy import accuracy
from hpctrain.plan.predicting.calibration import Calibration, calibrated, hardware_of, layout_of
from hpctrain.plan.predicting.estimate import Estimate, Estimator
from hpctrain.plan.predicting.rank_memory import CONTEXT_BYTES, GAPS, MemoryModel
from hpctrain.plan.predicting.timing import Efficiencies, best_of
from hpctrain.plan.ranking import Ranking, on, rank, scaling, sizes_of, smallest
from hpctrain.shards.types import Batch
from hpctrain.tasks.task import check_arguments
from hpctrain.units import GIB


@dataclass(frozen=True)
class Query:
    """What the command line asks for."""

    config: Config
    hardware: Hardware | None
    nodes: list[int] | None  # None leaves the numbers open
    shape: str | None  # of `--sample-shape`; None takes the data set's
    budget: str | None  # of `--budget`
    named: bool  # whether the command line names a layout
    layers: bool
    runs: Sequence[MeasuredRun] = ()
    # Layouts of one number of ranks are ranked, also beside a named one and on unknown hardware.
    measure: bool = False
    limits: Limits = field(default_factory=Limits)  # the values of `--deadline` and `--max-cost`


@dataclass(frozen=True)
class _Answer:
    """What `plan` prints; `kinds` has the smallest number of GPUs of each kind."""

    facts: ModelFacts
    layers: list[Layer]
    named: Estimate | None
    ranking: Ranking
    hardware: Hardware | None
    loader: LoaderRate
    kinds: list[tuple[Hardware, Estimate | None]] = field(default_factory=list)
    limits: Limits = field(default_factory=Limits)
    assumptions: dict[str, Any] = field(default_factory=dict)

    @property
    def layouts(self) -> list[Estimate]:
        """All estimates; that of the command line is the first, and occurs once."""
        if self.named is None:
            return self.ranking.best

        def known(one: Layout) -> tuple[object, ...]:
            return one.ranks, one.kind, one.batch, one.config.train.activation_checkpointing

        named = known(self.named.layout)
        others = (each for each in self.ranking.best if known(each.layout) != named)
        return [self.named, *others]

    @property
    def fits(self) -> bool | None:
        """Whether the layout of the command line, or else any other, is possible; None: unknown."""
        if self.named is not None:
            return False if self.limits.exceeded(*self.named.bill) else self.named.fits
        found = {estimate.fits for estimate in self.ranking.best}
        return True if True in found else None if None in found else False

    def as_json(self) -> dict[str, Any]:
        """Return the object that `--json` prints."""
        facts, flops = self.facts, self.facts.flops
        per_token = flops.training / flops.tokens if flops and flops.tokens else None
        return {
            "model": {
                "parameters": facts.parameters,
                "trainable": facts.trainable,
                "embedding": facts.embedding,
                "active": facts.active,
                "flops_per_sample": flops and flops.training,
                "flops_per_token": per_token,
            },
            "layouts": [estimate.as_json() for estimate in self.layouts],
            "scaling": [row.as_json() for row in scaling(self.ranking.best)],
            "loader": self.loader.as_json(self.layouts[0] if self.layouts else None),
            "hardware": [
                {"name": hardware.name, **(estimate.as_json() if estimate else {"fits": False})}
                for hardware, estimate in self.kinds
            ],
            "assumptions": {**self.assumptions, "excluded": self.ranking.excluded},
        }

    def show(self, console: Console, command: str) -> None:
        """Print the tables."""
        printing.print_model(console, self.facts)
        if self.layers:
            printing.print_layers(console, self.layers)
        if self.named is not None:
            most = max((kind.memory_bytes or 0 for kind, _ in self.kinds), default=math.inf)
            printing.print_memory(console, self.named, self.hardware, most)
            if self.hardware and (exceeded := self.limits.exceeded(*self.named.bill)):
                console.print(f"it {exceeded}", soft_wrap=True)
        if self.layouts and self.hardware:
            printing.print_layouts(console, self.layouts, self.hardware, command)
            console.print(f"off published runs: {self.assumptions['accuracy']}", soft_wrap=True)
            printing.print_scaling(console, scaling(self.ranking.best))
            console.print(f"\n{self.loader.text(self.layouts[0])}")
        printing.print_excluded(console, self.ranking.excluded)
        if self.kinds:
            printing.print_hardware(console, self.kinds)
        console.print("\nassumptions")
        for name, text in self.assumptions.items():
            console.print(f"  {name}: {text}")


def answer(asked: Query, others: list[Hardware]) -> _Answer:
    """Return the plan; a ConfigError if model, task, sample and layout do not fit."""
    config, hardware = asked.config, asked.hardware
    named_nodes = config.launch.node_numbers.start
    if asked.runs:
        hardware = hardware_of(Layout(config, named_nodes, ()), hardware, asked.runs)
    shape = None if asked.shape is None else parse_shape(asked.shape)
    if asked.named:
        of_command_line(config, named_nodes)  # errors of the config come before any work
    task = instantiate("task", config.task)
    sample = of_shape(task, shape) if shape else of_data(config.data)
    estimator, facts, model = _estimator(config, task, sample)
    samples = None if shape else samples_of_epoch(config.data)
    budget = budget_of(asked.budget, config.train, facts.tokens, samples)
    assert estimator.activations["none"]  # a sample that does not fit is an error before all else
    estimator.steps, estimator.limits = budget.steps, asked.limits
    price = hardware.price_per_hour if hardware else None
    asked.limits.check(budget, None if hardware is None else price.currency if price else "")
    if asked.runs and hardware is not None:
        estimator.calibration = _calibration(asked.runs, hardware)
    named = None
    if asked.named or asked.hardware is None:
        named = estimator.of(of_command_line(config, named_nodes), hardware)
        named = replace(named, reason="the layout of the command line")
    ranking = Ranking([], {})
    per_node = config.launch.tasks_per_node if config.launch.tasks_per_node > 1 else 0
    looks_around = asked.hardware is not None and not asked.named
    if asked.measure:
        nodes = asked.nodes or [named_nodes]
        per_node = config.launch.tasks_per_node if named is not None else per_node
        any_kind = hardware or of_section({"title": "hardware that is not named"})
        ranking = rank(config, estimator, any_kind, sizes_of(any_kind, nodes, per_node))
    elif hardware is not None and (looks_around or asked.nodes):
        ranking = rank(config, estimator, hardware, sizes_of(hardware, asked.nodes, per_node))
        if not ranking.best and asked.nodes is None:
            found = smallest(config, estimator, hardware, per_node)
            ranking = Ranking([found] if found else [], ranking.excluded)
    kinds = [(other, smallest(on(config, other), estimator, other)) for other in others]
    layers = layers_of(model, task, sample) if asked.layers else []
    efficiencies = estimator.efficiencies
    assumed = _assumptions(facts, estimator.activations, hardware, budget, efficiencies)
    if hardware is not None:
        assumed["accuracy"] = accuracy(facts, config)
    if estimator.calibration is not None:
        assumed |= estimator.calibration.assumptions
    loader = loader_rate(None if shape else config.data, config.output_dir, hardware)
    return _Answer(facts, layers, named, ranking, hardware, loader, kinds, asked.limits, assumed)


def _estimator(config: Config, task: Any, sample: Batch) -> tuple[Estimator, ModelFacts, nn.Module]:
    model = build_on_meta(_build(config))
    check_arguments([*signature(model.forward).parameters], getattr(task, "arguments", ()))
    facts = explained(partial(facts_of, model, task, sample), "plan: the model")
    activations = _Measured(config, task, sample)
    memory = MemoryModel(model, facts, activations)
    blocks = _count_blocks(model, config)
    return Estimator(facts, memory, activations, blocks), facts, model


def _build(config: Config) -> Build:
    return build_of(config.model, config.train.lora, config.optimizer, config.parallel.blocks)


def _calibration(runs: Sequence[MeasuredRun], hardware: Hardware) -> Calibration:
    """Return what measured runs say, beside what is predicted for them."""
    times, memory = [], []
    for run in runs:
        task, layout = instantiate("task", run.config.task), layout_of(run)
        estimator, *_ = _estimator(run.config, task, of_data(run.config.data))
        estimate = estimator.of(layout, hardware)
        if estimate.time is None:
            raise ConfigError(
                f"--from-run {run.path}: its FLOPs, or a figure of hardware={hardware.name}, are "
                "unknown, so there is nothing to compare its time with"
            )
        times.append(estimate.time)
        memory.append(estimate.memory)
    return calibrated(runs, times, memory)


class _Measured(dict[str, Activations]):
    """The activations for each mode of checkpointing, measured when they are first needed."""

    def __init__(self, config: Config, task: Any, sample: Batch) -> None:
        super().__init__()
        self._config, self._task, self._sample = config, task, sample

    def __missing__(self, mode: str) -> Activations:
        compute = {"bf16": "bf16", "fp8": "bf16", "fp16": "fp16"}.get(
            self._config.precision.compute
        )
        self[mode] = activations_of(
            _build(self._config),
            self._task,
            self._sample,
            None if compute is None else DTYPES[compute],
            replace(self._config.train, activation_checkpointing=mode),
        )
        return self[mode]


def _count_blocks(model: nn.Module, config: Config) -> int:
    with contextlib.suppress(ConfigError):
        return len(find_blocks(model, config.parallel.blocks))
    return 0


def _assumptions(
    facts: ModelFacts,
    activations: Mapping[str, Activations],
    hardware: Hardware | None,
    budget: Budget,
    efficiencies: Efficiencies,
) -> dict[str, Any]:
    found: dict[str, Any] = {
        "kind": "all figures but the parameters are estimates",
        "budget": budget.text,
        "flops": facts.flops.convention if facts.flops else "unknown",
        "activations": "measured with tensors without memory"
        if activations["none"].exact
        else "unknown: the model can be called only with values, so they are left out",
    }
    if hardware is not None:
        found |= {
            "hardware": hardware.title,
            "allowance": f"{CONTEXT_BYTES / GIB:g} GiB of context and {GAPS:.0%} of gaps",
            "products": f"{efficiencies.best or best_of(hardware):.0%} of the dense peak at most, "
            f"less for small ones; in fp8 {efficiencies.fp8:.0%} of that",
            "attention": f"{hardware.attention_efficiency or efficiencies.attention:.0%} of the "
            "peak, half of the square",
            "memory": f"{efficiencies.memory:.0%} of the HBM bandwidth; activations pass it "
            f"{efficiencies.traffic:g} times, with torch.compile {efficiencies.fused:g} times",
            "offload": f"{efficiencies.host_link / 1e9:g} GB/s to the host, whose memory gives "
            f"{efficiencies.host_memory / 1e9:g} GB/s for each GPU",
            "overlap": f"communication hides behind {efficiencies.overlap:.0%} of the computing"
            f" and slows it by {efficiencies.contention:.0%} of its own time",
        }
        found |= {f"unknown {name}": lost for name, lost in hardware.missing.items()}
    return found
