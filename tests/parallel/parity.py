"""Short trainings on a few ranks, whose results must equal those of one process."""

import functools
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import distributed, nn
from torch.distributed.tensor import DTensor

from hpctrain.addons.average import Average
from hpctrain.config.rules import batch_sizes
from hpctrain.config.rules.batch_sizes import ramp_of
from hpctrain.config.rules.combinations import parallel_problems
from hpctrain.config.rules.degrees import Degrees
from hpctrain.config.schema import Config, OptimizerConfig
from hpctrain.config.sections import LoopSections
from hpctrain.data.shards.types import Batch
from hpctrain.engine.building.build_optimizer import build_optimizer
from hpctrain.engine.building.parts import training_of
from hpctrain.engine.checkpoint.checkpointer import Checkpointer
from hpctrain.engine.faults.health import Health
from hpctrain.engine.layers.plan import Plan
from hpctrain.engine.parallel.mesh import Mesh
from hpctrain.engine.parallel.precision import DTYPES, Precision
from hpctrain.engine.parallel.preparing.initial import begin, fill
from hpctrain.engine.parallel.preparing.whole_model import cast_parameters
from hpctrain.engine.parallel.recipe import parallelize
from hpctrain.engine.parallel.setup import Build
from hpctrain.engine.parallel.wrappers.parallel_model import ParallelModel
from hpctrain.engine.supervised.micro_batches import Ramp
from hpctrain.engine.supervised.step import Totals, TrainStep
from hpctrain.models import ConvNet, Transformer, UNet
from hpctrain.tasks import Classification, LanguageModel, Regression, Sums, on_part
from tests.bounds import EXACT, within
from tests.parallel.forces import Adversarial, Energies, Fit, Forces, Penalty
from tests.parallel.frozen import Tower
from tests.ranks import run_ranks
from tests.steps import config_with, here, setup_of, step_of

# `make test-all` makes 10 steps. In 3 steps every step clips, momentum adds up, and each number of
# padding rows (see `batch`) has its turn.
STEPS = 10 if os.environ.get("HPCTRAIN_TESTS") == "all" else 3
# Trainings are in float64, unless a cell names another format: rounding is then far below any
# mistake. Those in float32 differ by about 1e-6, which grows with the steps.
FP64 = {"precision.compute": "fp64", "precision.params": "fp64"}
FP32 = (("precision.compute", "fp32"), ("precision.params", "fp32"))
ROWS = 16
CPU = torch.device("cpu")
EXPERTS: dict[str, Any] = {"experts": 4, "expert_hidden": 24, "dense_layers": 1}
EMA = 0.7
BEFORE = 2  # the steps of the first half of a training that is resumed


class Normed(nn.Module):
    """Blocks with a batch norm, of which a pipeline can have stages."""

    plan = Plan(blocks="blocks", last=("head",))

    def __init__(self, width: int = 64, blocks: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.ReLU())
            for _ in range(blocks)
        )
        self.head = nn.Linear(width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.flatten(1)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


# What `optimizer="features"` trains with: whole blocks and parts of blocks are frozen.
RULES: list[dict[str, Any]] = [
    {"match": "*norm*", "weight_decay": 0.0},
    {"match": ["embed.*", "layers.1.*", "layers.0.*query*"], "freeze": True},
    {"match": "layers.2.*", "lr_factor": 0.5},
    {"match": "layers.2.*norm*", "lr_factor": 2.0},
    {"match": "layers.2.*query*", "options": {"momentum": 0.5, "dampening": 0.1}},
]
MODELS: dict[str, Any] = {
    "transformer": functools.partial(Transformer, 61, 32, 3, 4, 2, tied=True),
    "untied": functools.partial(Transformer, 64, 32, 4, 4, 2),
    # Two ranks of tensor parallel leave 31 and 15 rows, which two others cannot divide evenly.
    "uneven": functools.partial(Transformer, 62, 24, 3, 4, 2, hidden=30),
    "untied, light": functools.partial(Transformer, 64, 32, 4, 4, 2),
    "gpt": functools.partial(
        Transformer, 64, 32, 4, 4, norm="layer", mlp="gelu", learned_positions=24, bias=True
    ),
    "moe": functools.partial(Transformer, 61, 32, 3, 4, 2, **EXPERTS, shared_experts=1),
    "conv": functools.partial(ConvNet, 1, [16, 32, 32], 10),
    "conv, batch norm": functools.partial(ConvNet, 1, [16, 32], 10, "batch"),
    "conv, stages": Normed,
    "fields, unet": functools.partial(UNet, 2, 1, [8, 16], periodic=True),
    "forces": Forces,
    "forces, then again": functools.partial(Forces, True),
    "forces, penalty": Energies,
    "forces, adversarial": Energies,
    "tower, head outside": functools.partial(Tower, True),
    "tower, head inside": functools.partial(Tower, False),
    "tower, head outside, no_grad": functools.partial(Tower, True, 3),
    "tower, head inside, no_grad": functools.partial(Tower, False, 3),
}


class Light(LanguageModel):
    """A language model whose tokens weigh so little that their weights add up to about 0.23."""

    def sums(self, outputs: Any, batch: Batch) -> Sums:
        total, count = super().sums(outputs, batch)["loss"]
        return {"loss": (0.0006 * total, 0.0006 * count)}


TASKS: dict[str, Any] = {
    "untied, light": functools.partial(Light, documents=True),
    "transformer": functools.partial(LanguageModel, documents=True),
    "untied": functools.partial(LanguageModel, documents=True),
    "uneven": functools.partial(LanguageModel, documents=True),
    "gpt": LanguageModel,
    "moe": functools.partial(LanguageModel, documents=True),
    "conv": functools.partial(Classification, scale=1 / 16),
    "conv, batch norm": functools.partial(Classification, scale=1 / 16),
    "conv, stages": functools.partial(Classification, scale=1 / 16),
    "fields, unet": functools.partial(Regression, loss="relative_l2"),
    "forces": Fit,
    "forces, then again": Fit,
    "forces, penalty": Penalty,
    "forces, adversarial": Adversarial,
    **{
        f"tower, head {place}{kind}": functools.partial(Classification, scale=1 / 16)
        for place in ("outside", "inside")
        for kind in ("", ", no_grad")
    },
}


class Values(list[Any]):
    """A list that a cell can have as the value of a key, because it has a hash."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(str(self))


@dataclass(frozen=True)
class Cell:
    """A training: the model, the number of ranks, and dotted config keys with their values."""

    model: str
    ranks: int
    keys: tuple[tuple[str, Any], ...] = ()
    optimizer: str = "sgd"  # "sgd, ema" keeps an average, "features" has groups as well
    steps: int = STEPS

    @property
    def averages(self) -> bool:
        """Whether there is a moving average, which evaluates the model after each step."""
        return self.optimizer in ("features", "sgd, ema")

    def __str__(self) -> str:
        keys = ",".join(f"{key.rpartition('.')[2]}={value}" for key, value in self.keys)
        return f"{self.model}-{self.ranks}-{keys or 'plain'}"


class Result(NamedTuple):
    """What a rank has seen: a loss and a gradient norm per step, and all final parameters."""

    losses: list[float]
    norms: list[float]
    parameters: dict[str, torch.Tensor]


@dataclass
class Training:
    """The objects of one rank's training."""

    config: Config
    mesh: Mesh
    model: ParallelModel
    step: TrainStep
    average: Average | None
    ramp: Ramp | None = None
    seen: int = 0
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    means: dict[str, float] = field(default_factory=dict)
    evaluated: list[float] = field(default_factory=list)

    def run(self, cell: Cell, steps: int) -> None:
        """Make `steps` global steps, and append the loss and gradient norm of each."""
        ramp = ramp_of(self.config.train)
        for _ in range(steps):
            lr = 1e-3 if cell.optimizer == "adamw" else 0.1
            rows = ramp.samples(self.seen + 1) - ramp.samples(self.seen)
            share = self._share(batch(cell.model, self.seen, rows))
            if self.ramp is not None:
                self.ramp.before_step(share)
            self.step(share, lr)
            self.means = self.step.totals.means()
            self.losses.append(self.means["loss"])
            self.norms.append(float(self.step.grad_norm))
            self.seen += 1
            if self.average:  # the parameters are exchanged, and then come back
                with self.average.applied():
                    self.evaluated.append(self._evaluate(cell))

    def _evaluate(self, cell: Cell) -> float:
        """Return the loss of one batch, by the average of the parameters."""
        totals = Totals()
        self.model.module.eval()
        totals.add(*self.model.evaluate(self.step.task, self._share(batch(cell.model, 99))))
        self.model.module.train()
        totals.reduce(self.mesh)
        return totals.means()["loss"]

    def _share(self, whole: Batch) -> Batch:
        rows, first = len(whole["mask"]) // self.mesh.shares, self.mesh.first_share
        mine = slice(first * rows, (first + self.mesh.weight) * rows)
        return {name: value[mine] for name, value in whole.items()}


def config(cell: Cell) -> Config:
    """Return the config of a cell, which must be valid for its number of ranks."""
    keys: dict[str, Any] = {"train.clip_norm": 0.2, "train.global_batch_size": ROWS}
    if not any(key.startswith("precision.") for key, _ in cell.keys):
        keys |= FP64
    if cell.optimizer == "features":
        options = {"momentum": 0.9}
        sgd = OptimizerConfig("torch.optim.SGD", lr=0.2, weight_decay=0.1, options=options)
        keys |= {"optimizer": sgd, "optimizer.groups": RULES, "optimizer.layer_decay": 0.8}
    made = config_with(keys | dict(cell.keys))
    degrees = Degrees.of(made.parallel, cell.ranks)
    problems = [*parallel_problems(made, degrees)]
    problems += batch_sizes.weight_problems(made.launch, made.parallel.weights, degrees)
    problems += batch_sizes.problems(made.train, made.parallel, degrees)
    assert not problems, problems
    return made


def mesh_of(config: Config, device: torch.device = CPU) -> Mesh:
    """Return the place of this rank in the layout of a config."""
    parallel, ranks = config.parallel, distributed.get_world_size()
    weights = parallel.weights and [*parallel.weights]
    return Mesh(Degrees.of(parallel, ranks), distributed.get_rank(), device, weights)


def precision_of(config: Config, device: torch.device = CPU) -> Precision:
    """Return the precision of a config, whose default dtype holds until the test or call ends."""
    torch.set_default_dtype(DTYPES["fp64" if config.precision.compute == "fp64" else "fp32"])
    return Precision(config.precision, device)


def spread(
    build: Build,
    config: Config,
    device: torch.device = CPU,
    *,
    loss_parallel: bool = False,
    arguments: Sequence[str] = (),
) -> ParallelModel:
    """Return a model on the ranks of the present process group."""
    mesh, precision = mesh_of(config, device), precision_of(config, device)
    training = training_of(LoopSections.of(config), mesh, loss_parallel, arguments)
    return parallelize(build, config.parallel, mesh, precision, training)


def build(cell: Cell, health: Health | None = None) -> Training:
    """Return the training of this rank in the present process group."""
    made = config(cell)
    mesh, precision = mesh_of(made), precision_of(made)
    if made.precision.compute == "fp16":
        precision.scale = 1024.0  # otherwise the first steps would be left out until a scale fits
    task = on_part(TASKS[cell.model](), mesh.sequence_part)
    training = training_of(LoopSections.of(made), mesh, task.loss_parallel)
    model = parallelize(MODELS[cell.model], made.parallel, mesh, precision, training)
    optimizer: torch.optim.Optimizer
    if cell.optimizer == "features":
        optimizer = build_optimizer(made.optimizer, model)
    elif "." in cell.optimizer:  # a class
        optimizer = build_optimizer(OptimizerConfig(cell.optimizer, lr=0.1), model)
        getattr(optimizer, "train", lambda: None)()
    elif cell.optimizer.startswith("sgd"):
        # A stage of a pipeline may have nothing to train.
        optimizer = torch.optim.SGD(model.parameters or [{"params": []}], momentum=0.9)
    else:
        optimizer = torch.optim.AdamW(model.parameters)
    base = made.optimizer.lr if cell.optimizer == "features" else None
    average = Average(model, EMA) if cell.averages else None
    rows = batch_sizes.parts_of_ramp(made.train, made.parallel, mesh.degrees, mesh.weight)
    ramp = Ramp(model, rows, None) if rows else None
    step = step_of(
        *(model, task, optimizer, made.train.clip_norm, health, base),
        parts=[average] if average else [],
    )
    return Training(made, mesh, model, step, average, ramp)


def batch(model: str, step: int, rows: int = ROWS) -> Batch:
    """Return a global batch whose last rows may be padding, as at the end of an epoch."""
    draw = torch.Generator().manual_seed(step)
    mask = torch.arange(rows) < rows - 3 * (step % 3)
    if model.startswith(("fields", "forces")):
        return {
            "x": torch.randn(rows, 2, 8, 6, generator=draw),
            "y": torch.randn(rows, 1, 8, 6, generator=draw),
            "mask": mask,
        }
    if model.startswith(("conv", "tower")):
        return {
            "image": torch.randint(0, 16, (rows, 1, 8, 8), generator=draw, dtype=torch.uint8),
            "label": torch.randint(0, 10, (rows,), generator=draw),
            "mask": mask,
        }
    shape = (rows, 25)
    return {
        "tokens": torch.randint(0, 61, shape, generator=draw),
        "tokens_document": (torch.rand(shape, generator=draw) < 0.1).int().cumsum(1),
        "mask": mask,
    }


def results(cells: tuple[Cell, ...]) -> dict[Cell, list[Result]]:
    """Train the cells, which have the same number of ranks; return the results by rank."""
    (ranks,) = {cell.ranks for cell in cells}
    answers = run_ranks(
        _train, ranks, cells, timeout=800 if any("compile" in str(cell) for cell in cells) else 480
    )
    return {cell: [answer[i] for answer in answers] for i, cell in enumerate(cells)}


def either(fast: Iterable[Any], slow: Iterable[Any], *, several: bool = False) -> list[Any]:
    """Return the values of a test's argument, of which `make test` leaves out the slow ones.

    With `several` each is one value for each of several arguments.
    """
    marked = ([each] if not several else each for each in slow)
    return [*fast, *(pytest.param(*each, marks=pytest.mark.slow) for each in marked)]


class Cells:
    """Trainings of which those that are as slow and have as many ranks are made in one call.

    This saves start-up time. `train` makes them, and returns the results by rank.
    """

    def __init__(
        self, fast: Iterable[Cell], slow: Iterable[Cell] = (), train: Callable[..., Any] = results
    ) -> None:
        self._kinds, self._train = ([*fast], [*slow]), train
        self._made: dict[Cell, list[Any]] = {}

    @property
    def params(self) -> list[Any]:
        """The parameters of a test of each of them."""
        return either(*self._kinds)

    def __getitem__(self, cell: Cell) -> list[Any]:
        """Return the results of a training by rank."""
        if cell not in self._made:
            kind = next(kind for kind in self._kinds if cell in kind)
            self._made |= self._train(tuple(c for c in kind if c.ranks == cell.ranks))
        return self._made[cell]


@functools.cache
def reference(
    model: str, optimizer: str = "sgd", steps: int = STEPS, keys: tuple[tuple[str, Any], ...] = ()
) -> Result:
    """Return the result of the training on one process, made once per test process."""
    (answer,) = run_ranks(_train, 1, (Cell(model, 1, keys, optimizer=optimizer, steps=steps),))
    result: Result = answer[0]
    return result


def _train(cells: tuple[Cell, ...]) -> list[Result]:
    return [train(cell) for cell in cells]


def train(cell: Cell) -> Result:
    """Make all steps of a cell, and return what this rank has seen."""
    training = build(cell)
    training.run(cell, cell.steps)
    return finished(cell, training)


def finished(cell: Cell, training: Training) -> Result:
    """Return what this rank has seen of a training."""
    parameters = whole(training.model)
    if training.average:
        named = training.average.tensors.items()
        parameters |= {f"ema.{name}": value for name, value in gathered(training.model, named)}
    return Result(training.losses + training.evaluated, training.norms, parameters)


def whole(model: ParallelModel) -> dict[str, torch.Tensor]:
    """Return every parameter whole, put together from all ranks."""
    return dict(gathered(model, model.module.named_parameters()))


def gathered(
    model: ParallelModel, named: Iterable[tuple[str, torch.Tensor]]
) -> Iterable[tuple[str, torch.Tensor]]:
    """Return tensors of this rank whole, together with those of the other stages."""
    own = {
        name.removeprefix("module."): (p.full_tensor() if isinstance(p, DTensor) else p).detach()
        for name, p in named
    }
    if model.mesh.degrees.pp == 1:
        return own.items()
    stages: list[Any] = [None] * model.mesh.degrees.pp
    distributed.all_gather_object(stages, own, model.mesh.pp_group)
    return [pair for stage in stages for pair in stage.items()]


def difference(result: Result, expected: Result) -> tuple[float, float, float]:
    """Return the largest relative differences of losses, norms and parameters.

    The difference of the parameters is relative to the largest element of any parameter.
    """

    def relative(ours: list[float], theirs: list[float]) -> float:
        pairs = zip(ours, theirs, strict=True)
        return max(abs(a - b) / abs(b) for a, b in pairs)

    # Two models that do not train agree, too.
    assert not any(norm == 0 for norm in expected.norms), "a step has no gradient"
    assert len(expected.losses) == 1 or len(set(expected.losses)) > 1, "the loss has not moved"
    assert result.parameters.keys() == expected.parameters.keys()
    largest = max(float(value.abs().max()) for value in expected.parameters.values())
    worst = max(
        float((value.cdouble() - expected.parameters[name].cdouble()).abs().max())
        for name, value in result.parameters.items()
    )
    losses = relative(result.losses, expected.losses)
    return losses, relative(result.norms, expected.norms), worst / largest


def check_equal(cell: Cell, by_rank: list[Result]) -> None:
    """Fail unless every rank has seen what one process sees, in steps that were clipped."""
    expected = reference(cell.model.removesuffix(", light"))  # a mean is that of any weight
    for result in by_rank:
        assert len(result.losses) == STEPS
        within(difference(result, expected), EXACT)
    assert min(expected.norms) > 0.2, "clipping must bite"


def initialised(build: Build, seed: int, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """Return the initialised model of one process."""
    how = setup_of(build, Mesh(Degrees(), 0, device), seed=seed)
    model, values = begin(how)
    cast_parameters(model, dtype)
    fill(how, model.to(device) if values == "built" else model, values)
    return model


def checkpointer(training: Training, folder: Path, base: str = "") -> Checkpointer:
    """Return the checkpointer of a training; `base` is the digest of the weights of adapters."""
    step = training.step
    average = training.average.tensors if training.average else {}
    return Checkpointer(
        folder, 2, here(), training.model, step.optimizer, average=average, base=base
    )


def saved(cell: Cell, folder: Path, base: str = "") -> Training:
    """Return a training that has made its first steps and has saved them."""
    training = build(cell)
    training.run(cell, BEFORE)
    checkpointer(training, folder, base).save(BEFORE, {"step": BEFORE})
    return training


def save(cell: Cell, folder: Path, base: str = "") -> None:
    """Make and save the first steps of a training; ranks cannot send what `saved` returns."""
    saved(cell, folder, base)


def gone_on(cell: Cell, folder: Path, base: str = "") -> Training:
    """Return a training that has gone on from a checkpoint of its first steps to its end."""
    training = build(cell)
    assert checkpointer(training, folder, base).load_latest() == {"step": BEFORE}
    training.seen = BEFORE
    training.run(cell, cell.steps - BEFORE)
    return training


def resumed(cell: Cell, folder: Path, base: str = "") -> Result:
    """Return the result of a training that has gone on from its first steps."""
    return finished(cell, gone_on(cell, folder, base))


def halves(cell: Cell, folder: Path, saves: bool) -> Result:
    """Train and save in the middle, or go on from there; return the result."""
    if not saves:
        return resumed(cell, folder)
    training = saved(cell, folder)
    training.run(cell, cell.steps - BEFORE)
    return finished(cell, training)


def rest_of(result: Result) -> Result:
    """Return what a training without evaluations has seen after its first steps."""
    return Result(result.losses[BEFORE:], result.norms[BEFORE:], result.parameters)
