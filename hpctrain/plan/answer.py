"""Puts the answer of `plan` together: the model, the layouts and the hardware."""

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hpctrain.config.schema import Config
from hpctrain.config.validate import validate_job
from hpctrain.console import Console
from hpctrain.distributed.devices import CONTEXT_BYTES
from hpctrain.errors import ConfigError
from hpctrain.estimates.measured_run import MeasuredRun
from hpctrain.estimates.memory_fit import MARGIN
from hpctrain.hardware import Hardware, of_section
from hpctrain.plan import printing
from hpctrain.plan.budget import Limits, budget_of
from hpctrain.plan.failures import Failures
from hpctrain.plan.inspecting.model_facts import Layer, layers_of
from hpctrain.plan.inspecting.sample_shape import samples_of_epoch, task_and_sample
from hpctrain.plan.layouts import Layout, of_command_line
from hpctrain.plan.loader_rate import LoaderRate, loader_rate
from hpctrain.plan.predicting.accuracy import accuracy, memory_accuracy
from hpctrain.plan.predicting.calibration import calibrated, hardware_of, layout_of
from hpctrain.plan.predicting.estimate import Estimate, uncompared_line
from hpctrain.plan.predicting.estimator import Estimator
from hpctrain.plan.predicting.rank_memory import GAPS
from hpctrain.plan.ranking import Kind, Ranking, by_cost, on, rank, scaling, sizes_of, smallest
from hpctrain.units import GIB, readable


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
    per_node: int = 0  # the ranks of a node that are asked for; 0 takes those of the hardware
    failing: tuple[float, float | None] | None = None  # hours of `--mtbf` and `--restart`


_SIZES = ("parameters", "trainable", "embedding", "active")
_SCALED = ("nodes", "ranks", "overrides", "step_s", "samples_per_s", "tokens_per_s_per_gpu")


@dataclass(frozen=True)
class _Answer:
    """What `plan` prints; `kinds` has the smallest number of GPUs of each kind."""

    config: Config
    estimator: Estimator
    layers: list[Layer]
    named: Estimate | None
    ranking: Ranking
    hardware: Hardware | None
    loader: LoaderRate
    kinds: list[Kind]

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
            return self._meets(self.named)
        found = {self._meets(estimate) for estimate in self.ranking.best}
        return True if True in found else None if None in found else False

    def _meets(self, one: Estimate) -> bool | None:
        """Return whether a layout fits, and takes no more than it may; None if that is unknown."""
        excess = self.estimator.limits.excess(*one.bill)
        if one.fits is False or (excess is not None and excess > 1):
            return False
        return None if excess is None else one.fits

    def as_json(self) -> dict[str, Any]:
        """Return the object that `--json` prints."""
        facts, flops, layouts = self.estimator.facts, self.estimator.facts.flops, self.layouts
        every = (*layouts, *(one for _, one in self.kinds if one))
        per_token = flops.training / flops.tokens if flops and flops.tokens else None
        operations = {"flops_per_sample": flops and flops.training, "flops_per_token": per_token}
        left_out = {
            "not compared": uncompared_line(every) or None,
            "excluded": self.ranking.excluded,
        }
        return {
            "model": {name: getattr(facts, name) for name in _SIZES} | operations,
            "layouts": [estimate.as_json() for estimate in layouts],
            "scaling": [
                {name: one.as_json()[name] for name in _SCALED} | {"efficiency": part}
                for one, part in scaling(self.ranking.best)
            ],
            "loader": self.loader.as_json(layouts[0] if layouts else None),
            "hardware": [
                {"name": hardware.name, **(one.as_json() if one else {"fits": False})}
                for hardware, one in self.kinds
            ],
            "assumptions": self.assumptions | left_out,
        }

    def show(self, console: Console, overrides: Sequence[str]) -> None:
        """Print what a beginner asks first, then the tables, and what they rest on."""
        assumed = self.assumptions
        self._show_first(console, overrides)
        if self.layouts and self.hardware:
            printing.print_layouts(console, self.layouts)
            printing.print_scaling(console, scaling(self.ranking.best))
        if self.kinds:
            printing.print_hardware(console, self.kinds)
        if self.named is not None:
            printing.print_memory(console, self.named)
        console.print()
        printing.print_model(console, self.estimator.facts)
        if self.layers:
            printing.print_layers(console, self.layers)
        if self.layouts and self.hardware:
            told = "off published runs: {accuracy}; memory: {memory accuracy}"
            console.print(told.format_map(assumed), soft_wrap=True)
            console.print(self.loader.text(self.layouts[0]))
        printing.print_excluded(console, self.ranking.excluded)
        console.print("\nassumptions")
        for name, text in assumed.items():
            if "accuracy" not in name:  # they stand below the table
                console.print(f"  {name}: {text}")

    def _show_first(self, console: Console, overrides: Sequence[str]) -> None:
        size, limits = self.estimator.facts.parameters, self.estimator.limits
        named, hardware = self.named, self.hardware
        if hardware is None and named is not None:
            most = max((kind.memory_bytes or 0 for kind, _ in self.kinds), default=math.inf)
            needed = printing.needs(size, named, most)
            console.print(f"{needed}; hardware=NAME shows layouts that fit")
        elif hardware is not None and self.layouts:
            printing.print_summaries(console, size, self.layouts, overrides)
        elif hardware is not None:
            what = f"{printing.big(size)} parameters on {hardware.title}"
            console.print(f"no layout of {what} is possible")
        if hardware and named and (exceeded := limits.exceeded(*named.bill)):
            console.print(f"it {exceeded}", soft_wrap=True)
        if hardware and self.layouts and limits.excess(*self.layouts[0].bill) is None:
            console.print("whether that is within --deadline and --max-cost is unknown")
        printing.print_first_kind(console, size, self.kinds)

    @property
    def assumptions(self) -> dict[str, Any]:
        """What the answer rests on."""
        estimator, hardware, flops = self.estimator, self.hardware, self.estimator.facts.flops
        found: dict[str, Any] = {
            "kind": "all figures but the parameters are estimates",
            "budget": estimator.budget.text,
            "flops": flops.convention if flops else "unknown",
            "activations": "measured with tensors without memory"
            if estimator.activations["none"].exact
            else "unknown: the model can be called only with values, so they are left out",
        }
        if hardware is not None:
            found |= {
                "hardware": hardware.title,
                "allowance": f"{CONTEXT_BYTES / GIB:g} GiB of context and {GAPS:.0%} of gaps",
                "margin": f"what fits leaves {MARGIN:.0%} of the GPU's memory free; tight leaves "
                "less",
                **estimator.efficiencies.on(hardware).assumptions,
            }
            found |= {f"unknown {name}": lost for name, lost in hardware.missing.items()}
        if estimator.calibration is not None:
            found |= estimator.calibration.assumptions
        if estimator.failures is not None:
            found["failures"] = estimator.failures.text
        if hardware is not None:
            found["accuracy"] = accuracy(estimator.facts, self.config)
            found["memory accuracy"] = memory_accuracy()
        return found


def answer(asked: Query, others: list[Hardware]) -> _Answer:
    """Return the plan; a ConfigError if model, task, sample and layout do not fit."""
    config, hardware = asked.config, asked.hardware
    named_nodes = config.launch.node_numbers.start
    if asked.runs:
        hardware = hardware_of(Layout(config, named_nodes, ()), hardware, asked.runs)
    # Errors of the config come before any work.
    validate_job(config, _CHECKED)
    if asked.named:
        of_command_line(config, named_nodes)
    if hardware is not None:
        _check_node(config, hardware, asked.per_node)
    task, sample = task_and_sample(config, asked.shape)
    estimator, model = Estimator.of_config(config, task, sample)
    samples = None if asked.shape else samples_of_epoch(config.data)
    budget = budget_of(asked.budget, config.train, estimator.facts.tokens, samples)
    estimator.budget, estimator.limits = budget, asked.limits
    price = hardware.price_per_hour if hardware else None
    asked.limits.check(budget, None if hardware is None else price.currency if price else "")
    loader = loader_rate(None if asked.shape else config.data, config.output_dir, hardware)
    measured = [
        (Estimator.of_config(run.config, *task_and_sample(run.config))[0], run)
        for run in asked.runs
    ]
    if hardware is not None and measured:
        estimates = [its.of(layout_of(run), hardware) for its, run in measured]
        estimator.calibration = calibrated(asked.runs, estimates, hardware)
    if asked.failing is not None:
        runs = [(run, its.checkpoint_bytes(run.config)) for its, run in measured]
        nbytes, storage = estimator.checkpoint_bytes(config), (loader.storage, loader.source)
        estimator.failures = Failures.of(asked.failing, nbytes, storage, runs)
    assert estimator.activations["none"]  # a sample that does not fit is an error of its own
    named, ranking, per_node = None, Ranking([], {}), asked.per_node
    if asked.named or asked.hardware is None:
        named = estimator.of(of_command_line(config, named_nodes), hardware)
        hint = _half_the_base(config, named, estimator, hardware)
        parts = filter(None, ("the layout of the command line", hint, named.mark))
        named = replace(named, reason="; ".join(parts))
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
    kinds = by_cost((other, smallest(on(config, other), estimator, other)) for other in others)
    layers = layers_of(model, task, sample) if asked.layers else []
    return _Answer(config, estimator, layers, named, ranking, hardware, loader, kinds)


# The sections and keys whose values decide a plan.
_CHECKED = ("launch", "train", "parallel", "precision", "optimizer", "checkpoint")


def _check_node(config: Config, hardware: Hardware, per_node: int) -> None:
    """Raise a ConfigError if a node is to have more ranks than GPUs."""
    gpus = hardware.gpus_per_node
    if gpus and per_node > gpus and config.parallel.device != "cpu":
        raise ConfigError(
            f"launch.tasks_per_node={per_node}: a node of hardware={hardware.name} has {gpus} "
            f"GPUs, and each rank needs one: use launch.tasks_per_node={gpus} and more "
            f"launch.nodes, or hardware.gpus_per_node={per_node} if yours have as many"
        )


def _half_the_base(
    config: Config, named: Estimate, estimator: Estimator, hardware: Hardware | None
) -> str:
    """Return a hint for adapters that fit only beside a base in 16 bits."""
    if named.fits is not False or not config.train.lora.patterns:
        return ""
    layout = copy.deepcopy(named.layout)
    layout.config.precision = replace(config.precision, compute="bf16", params="bf16", reduce=None)
    halved = estimator.of(layout, hardware)
    total = readable(halved.memory.total)
    return f"precision=pure_bf16 needs {total} and fits" if halved.fits else ""
