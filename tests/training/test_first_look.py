"""Tests of what is asked of a user's model and task in the first steps; two ranks or one."""

import functools
import logging
import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import distributed, nn

from hpctrain.addons.looking.first_look import FirstLook
from hpctrain.addons.looking.held_values import HeldValues, check_parameters
from hpctrain.data.shards.types import Batch
from hpctrain.engine.layers.plan import Plan
from hpctrain.engine.part import Part
from hpctrain.engine.tasks.task import TaskState
from hpctrain.errors import ConfigError
from hpctrain.tasks import SplitTask, Sums
from tests.parallel.parity import FP64, config_with, spread
from tests.ranks import run_ranks
from tests.steps import step_of
from tests.training import optimizers

ROWS = 8  # of a rank
STEPS = 4


class Net(nn.Module):
    """Two blocks with dropout; the others here add something of their own to the first one."""

    plan = Plan(blocks="blocks", last=("head",))

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.block() for _ in range(2))
        self.head = nn.Linear(6, 1)

    def block(self) -> nn.Module:
        return nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Dropout(0.2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Cached(nn.Linear):
    """Keeps what no later step depends on."""

    def __init__(self) -> None:
        super().__init__(6, 6)
        self.positions: torch.Tensor | None = None
        self.register_buffer("table", None, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.positions is None:
            self.positions = torch.arange(6, dtype=x.dtype)
            self.table = self.positions.cos()
        self.seen = super().forward(x + 0.1 * self.table)
        return self.seen


class Codes(nn.Linear):
    """A codebook of one code, which is a moving average over the rows."""

    def __init__(self) -> None:
        super().__init__(6, 6)
        self.register_buffer("code", torch.zeros(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.code.lerp_(x.detach().mean(0), 0.1)
        return super().forward(x - self.code)


class SharedCodes(Codes):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            mean = x.detach().mean(0)
            distributed.all_reduce(mean)
            self.code.lerp_(mean / distributed.get_world_size(), 0.1)
        return nn.Linear.forward(self, x - self.code)


class Counting(nn.Linear):
    """Adds less with each training step, as an annealed noise does."""

    def __init__(self) -> None:
        super().__init__(6, 6)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += self.training
        return super().forward(x) / (1 + self.calls)


class Bank(nn.Linear):
    """A memory of the last rows, in a buffer that no checkpoint has."""

    def __init__(self) -> None:
        super().__init__(6, 6)
        self.register_buffer("bank", torch.zeros(6), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = super().forward(x + self.bank)
        if self.training:
            self.bank.copy_(x.detach()[0])
        return out


class Named(nn.Linear):
    """Does something else where FSDP has made another class of it."""

    def __init__(self) -> None:
        super().__init__(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (1 if type(self).__name__ == "Named" else 2)


class Managed(nn.Linear):
    """As models of transformers do with a layer that LayerDrop skips."""

    def __init__(self) -> None:
        super().__init__(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert not hasattr(self, "_is_fsdp_managed_module")
        return super().forward(x)


KINDS = (Cached, Codes, SharedCodes, Counting, Bank, Named, Managed)


class Built(Net):
    """A net whose blocks are of one of these classes."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        super().__init__()
        self.kind = ""

    def block(self) -> nn.Module:
        kinds = {one.__name__: one for one in KINDS}
        return kinds[self.kind]() if self.kind in kinds else super().block()


class Rows(SplitTask):
    """The mean over the rows of a squared error."""

    def inputs(self, batch: Batch) -> tuple[torch.Tensor, ...]:
        return (batch["x"],)

    def losses(self, outputs: Any, batch: Batch) -> torch.Tensor:
        return (outputs[:, 0] - batch["y"]) ** 2

    def sums(self, outputs: Any, batch: Batch) -> Sums:
        mask = batch["mask"]
        return {"loss": ((self.losses(outputs, batch) * mask).sum(), mask.sum())}


class Ratio(Rows):
    """One minus the Dice of a batch, as a sum and a count."""

    def sums(self, outputs: Any, batch: Batch) -> Sums:
        p, y = outputs[:, 0].sigmoid() * batch["mask"], (batch["y"] > 0) * batch["mask"]
        both = p.sum() + y.sum()
        return {"loss": (both - 2 * (p * y).sum(), both)}


class MeanOfAll(Rows):
    def sums(self, outputs: Any, batch: Batch) -> Sums:
        count = batch["mask"].sum()
        return {"loss": (self.losses(outputs, batch).mean() * count, count)}


class CountsAll(Rows):
    def sums(self, outputs: Any, batch: Batch) -> Sums:
        loss = self.losses(outputs, batch) * batch["mask"]
        return {"loss": (loss.sum(), torch.tensor(float(len(loss))))}


class Contrastive(Rows):
    """Each row against the mean of the rows that count, and a number of its own."""

    def sums(self, outputs: Any, batch: Batch) -> Sums:
        mask = batch["mask"]
        mean = (outputs[:, 0] * mask).sum() / mask.sum().clamp(min=1)
        loss = (((outputs[:, 0] - mean) ** 2) * mask).sum()
        return {"loss": (loss, mask.sum()), "heat": (loss.new_tensor(0.07), loss.new_tensor(1.0))}


class Annealed(Rows):
    """A weight that grows with the steps that the task has counted by itself."""

    def __init__(self) -> None:
        self.steps = 0

    def losses(self, outputs: Any, batch: Batch) -> torch.Tensor:
        self.steps += 1
        return super().losses(outputs, batch) * (1 + 0.1 * self.steps)


class CountsOnly(Annealed):
    def losses(self, outputs: Any, batch: Batch) -> torch.Tensor:
        self.steps += 1
        return Rows.losses(self, outputs, batch)


class Told(Rows):
    """A weight that grows with the steps that it is told."""

    step = 0

    def at_step(self, step: int) -> None:
        self.step = step

    def losses(self, outputs: Any, batch: Batch) -> torch.Tensor:
        return super().losses(outputs, batch) * (1 + 0.1 * self.step)


class Saved(Annealed):
    """One that saves what it counts."""

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = state["steps"]


class OwnRows(Saved):
    def losses(self, outputs: Any, batch: Batch) -> torch.Tensor:
        self.steps += int((batch["y"] > 0).sum()) + distributed.get_rank()
        return Rows.losses(self, outputs, batch)


class Draws(Rows):
    """Has random numbers of its own, which no checkpoint knows."""

    def __init__(self) -> None:
        self.noise = torch.Generator().manual_seed(0)

    def losses(self, outputs: Any, batch: Batch) -> torch.Tensor:
        noise = torch.rand(len(outputs), generator=self.noise)
        return super().losses(outputs + noise[:, None], batch)


TASKS = {
    kind.__name__: kind
    for kind in (Rows, Ratio, MeanOfAll, CountsAll, Contrastive, Annealed, CountsOnly)
} | {kind.__name__: kind for kind in (Told, Saved, OwnRows, Draws)}
DDP: dict[str, Any] = {}
ZERO3 = {"parallel.dp_shard": 2, "parallel.dp_replicate": 1, "parallel.zero": 3}
PIPELINE = {"parallel.pp": 2, "train.accumulate": 2}


@dataclass(frozen=True)
class Case:
    """A training of two ranks; `says` is in its error, or in the warning of rank 0."""

    says: str = ""
    task: str = "Rows"
    model: str = ""
    keys: dict[str, Any] = field(default_factory=dict)
    filled: tuple[bool, bool] = (False, True)
    warns: bool = False
    optimizer: type[torch.optim.Optimizer] = torch.optim.SGD

    def __str__(self) -> str:
        layout = ",".join(f"{key.rpartition('.')[2]}={value}" for key, value in self.keys.items())
        optimizer = self.optimizer.__name__
        return f"{self.task} {self.model or 'Net'} {layout or 'ddp'} {optimizer}"


def errors(says: str, *layouts: dict[str, Any], **case: Any) -> list[Case]:
    return [Case(says, keys=keys, **case) for keys in layouts]


CASES = [
    *errors("", DDP, ZERO3, PIPELINE),
    *errors("the count of the task's loss depends on the model", DDP, task="Ratio"),
    *errors("its loss changes with rows whose mask is False", PIPELINE, task="MeanOfAll"),
    *errors("", DDP, task="MeanOfAll", filled=(False, False)),
    *errors("the count of its loss has rows whose mask is False", ZERO3, task="CountsAll"),
    *errors("the loss of a batch is not that of its two", DDP, task="Contrastive", warns=True),
    *errors("", DDP, model="Cached"),
    *errors("the buffer blocks.0.code (Codes) and 1 more", ZERO3, model="Codes", warns=True),
    *errors("one of 2 micro-batches", PIPELINE, model="Codes", warns=True),
    *errors("blocks.0.code (Codes) and 1 more, a buffer", DDP, model="Codes", filled=(True, True)),
    *errors("model.blocks.0.calls, model.blocks.1.calls changed", DDP, model="Counting"),
    *errors("model.blocks.0.bank, model.blocks.1.bank changed", DDP, model="Bank"),
    *errors("gives another loss where FSDP divides it", ZERO3, model="Named"),
    *errors("", ZERO3, model="Managed"),
    *errors("task.steps changed in the first steps", PIPELINE, task="Annealed"),
    *errors("task.steps changed in the first steps", DDP, task="CountsOnly"),
    *errors("", PIPELINE, task="Told"),
    *errors("", DDP, task="Saved"),
    *errors("OwnRows.state_dict() is another one on rank 1", DDP, task="OwnRows"),
    *errors("task.noise changed in the first steps", DDP, task="Draws"),
    *errors(
        "optimizer.count of tests.training.optimizers.Counting", DDP, optimizer=optimizers.Counting
    ),
    *errors("", DDP, optimizer=optimizers.Lion),
    *errors("", DDP, model="SharedCodes"),
]


class _Warnings(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def batch(seed: int) -> Batch:
    draw = torch.Generator().manual_seed(10 * seed + distributed.get_rank())
    rows = torch.randn(ROWS, 7, generator=draw, dtype=torch.float64)
    return {"x": rows[:, :6], "y": rows[:, 6], "mask": torch.ones(ROWS, dtype=torch.bool)}


def training(case: Case, *, looks: bool = True) -> tuple[list[float], bytes]:
    """Return the losses of a training, and the state of the random numbers at its end."""
    config = config_with(FP64 | {"train.global_batch_size": 2 * ROWS} | case.keys)
    model = spread(lambda: Built(case.model), config)
    model.accumulate = config.train.accumulate or 1
    task = TASKS[case.task]()
    optimizer = case.optimizer(model.parameters, lr=0.1)  # type: ignore[call-arg]
    step = step_of(model, task, optimizer, clip_norm=None)
    look = FirstLook(model, task, optimizer, case.filled) if looks else Part()
    torch.manual_seed(1)
    losses = []
    for number in range(STEPS):
        rows = batch(number)
        look.before_step(rows)
        step(rows, 0.1)
        look.after_step(number + 1, rows)
        losses.append(step.report()["train/loss"])
    return losses, torch.get_rng_state().numpy().tobytes()


def said(cases: list[Case]) -> list[tuple[str, str]]:
    """Return the error and the warnings of each training on this rank."""
    found = []
    for case in cases:
        warned = _Warnings()
        logging.getLogger("hpctrain").addHandler(warned)
        error = ""
        try:
            training(case)
        except ConfigError as raised:
            error = str(raised)
        logging.getLogger("hpctrain").removeHandler(warned)
        found.append((error, "; ".join(warned.texts)))
    return found


@functools.cache
def answers() -> list[list[tuple[str, str]]]:
    return run_ranks(said, 2, CASES)


@pytest.mark.parametrize("number", range(len(CASES)), ids=lambda number: str(CASES[number]))
def test_what_the_look_says(number: int) -> None:
    case = CASES[number]
    (error, warned), (other, _) = (rank[number] for rank in answers())
    assert error == other
    if case.warns or not case.says:
        assert not error
        assert case.says in warned
        assert bool(warned) == case.warns
    else:
        assert case.says in error


def undisturbed(cases: list[Case]) -> list[bool]:
    return [training(case) == training(case, looks=False) for case in cases]


def test_the_look_leaves_no_trace() -> None:
    kept = [case for case in CASES if not case.says or case.warns]
    for answer in run_ranks(undisturbed, 2, kept):
        assert answer == [True] * len(kept)


class Centred(Rows):
    """Has parameters in each place where one may be."""

    def __init__(self) -> None:
        self.centres = nn.Parameter(torch.zeros(3))
        self.projection = nn.Linear(2, 2)
        self.weights = {"kl": torch.zeros(1, requires_grad=True)}
        self.teacher = nn.Linear(2, 2).requires_grad_(False)
        self.metrics = {"own": nn.Linear(2, 2)}  # type: ignore[dict-item]


def test_a_task_with_parameters_is_refused() -> None:
    names = "centres, weights, projection.weight"
    with pytest.raises(ConfigError, match=rf"Centred has parameters of its own \({names} and 1"):
        check_parameters(Centred())
    check_parameters(Rows())


def test_held_values_come_back_also_within_containers() -> None:
    task = Draws()
    held = {"list": [torch.zeros(2), {"n": 1}], "array": np.zeros(3), "random": random.Random(1)}
    vars(task).update(held)
    before = HeldValues(nn.Identity(), task)
    assert before.changed() == []
    first = torch.rand(1, generator=task.noise), held["random"].random()
    held["list"][0] += 1
    held["list"][1]["n"] = 2
    held["array"][1] = np.nan
    task.later = 5
    assert before.changed() == [f"task.{n}" for n in ("noise", "list", "array", "random", "later")]
    before.restore()
    assert before.changed() == []
    assert vars(task)["array"] is held["array"]
    assert (torch.rand(1, generator=task.noise), held["random"].random()) == first


def test_a_state_that_json_has_no_form_for_is_refused() -> None:
    task = Saved()
    task.steps = torch.zeros(1)
    with pytest.raises(ConfigError, match=r"Saved.state_dict\(\) must return numbers, texts"):
        TaskState(task).state_dict()
