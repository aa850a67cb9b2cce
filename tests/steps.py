"""A training step on a small model, and this rank and its config, for tests of parts of a step."""

import functools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed.checkpoint as dcp
from torch import distributed, nn
from torch.utils._python_dispatch import TorchDispatchMode

from hpctrain.cluster.ranks.ranks import RankInfo
from hpctrain.config.rules.degrees import Degrees
from hpctrain.config.rules.metrics import RequestedMetric
from hpctrain.config.schema import (
    Config,
    OptimizerConfig,
    ParallelConfig,
    PrecisionConfig,
    SchedulerConfig,
    TrainConfig,
)
from hpctrain.engine.checkpoint.checkpointer import Checkpointer
from hpctrain.engine.checkpoint.saving.part import facts
from hpctrain.engine.faults.health import Health
from hpctrain.engine.faults.stop import Stop
from hpctrain.engine.loop import Trainer
from hpctrain.engine.parallel.mesh import Mesh
from hpctrain.engine.parallel.precision import Precision
from hpctrain.engine.parallel.reducing.scalars import Exchange
from hpctrain.engine.parallel.setup import Build, Setup, Training
from hpctrain.engine.parallel.wrappers.parallel_model import ParallelModel
from hpctrain.engine.part import Part
from hpctrain.engine.parts.display import Display
from hpctrain.engine.steps.saving import Saving, Timer
from hpctrain.engine.steps.stepping import Stepping
from hpctrain.engine.supervised.evaluations import Evaluations
from hpctrain.engine.supervised.schedule import Schedule
from hpctrain.engine.supervised.step import TrainStep
from hpctrain.models import MLP
from hpctrain.runs.checkpoints.manifest import Manifest
from hpctrain.tasks import Classification
from hpctrain.tracking.tracker import Tracker

_stack = torch.stack
CPU = torch.device("cpu")
ALONE = RankInfo.from_env({"HPCTRAIN_LAUNCHER": "single"})


class Watched(TorchDispatchMode):
    """Calls a function with each operation of torch and with what it returns."""

    def __init__(self, see: Callable[[Any, Any], object]) -> None:
        super().__init__()
        self._see = see

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self._see(func, out)
        return out


def here() -> RankInfo:
    """Return this rank of the present process group."""
    rank, size = distributed.get_rank(), distributed.get_world_size()
    return RankInfo("test", rank, rank, 0, size, size, 1, "localhost", 1)


def config_with(keys: Mapping[str, Any]) -> Config:
    """Return the default config with other values of dotted keys."""
    config = Config()
    for key, value in keys.items():
        *sections, name = key.split(".")
        setattr(functools.reduce(getattr, sections, config), name, value)
    return config


def batch(size: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """Return a batch of `size` random digits."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "image": torch.randint(0, 16, (size, 1, 8, 8), generator=generator, dtype=torch.uint8),
        "label": torch.randint(0, 10, (size,), generator=generator),
        "mask": torch.ones(size, dtype=torch.bool),
    }


def make(accumulate: int = 1, clip_norm: float | None = None, dropout: float = 0.0) -> TrainStep:
    """Return a training step on a small MLP, which has the same weights at each call."""
    torch.manual_seed(0)
    model = alone(MLP(64, [16], 10, dropout), accumulate)
    optimizer = torch.optim.AdamW(model.parameters, lr=1e-3)
    return step_of(model, Classification(), optimizer, clip_norm)


def step_of(
    model: ParallelModel,
    task: Any,
    optimizer: torch.optim.Optimizer,
    clip_norm: float | None = None,
    health: Health | None = None,
    base_lr: float | None = None,
    asking: Sequence[Any] = (),
    parts: Sequence[Part] = (),
) -> TrainStep:
    """Return a training step, in whose reduction a stop request has its flags."""
    every = [*asking, *filter(None, [model.unused])]
    if not any(isinstance(each, Stop) for each in every):
        every = [Stop(), *every]
    exchange = Exchange(model.mesh, every)
    given = model, task, optimizer, exchange, health
    step = TrainStep(*given, clip_norm=clip_norm, base_lr=base_lr)
    step.use(parts)
    return step


def stop_of(step: TrainStep) -> Stop:
    """Return the stop request that a step asks for."""
    return next(each for each in step.exchange.asking if isinstance(each, Stop))


def alone(module: nn.Module, accumulate: int = 1, device: torch.device = CPU) -> ParallelModel:
    """Return the model without a parallel strategy, in fp32: each rank has a copy of its own."""
    mesh = Mesh(Degrees(distributed.get_world_size()), distributed.get_rank(), device)
    return ParallelModel(module.to(device), setup_of(module, mesh, accumulate))


def setup_of(build: Build, mesh: Mesh, accumulate: int = 1, *, seed: int = 0) -> Setup:
    """Return the setup of a model in fp32 that is not divided."""
    training = Training(TrainConfig(), OptimizerConfig(), seed, accumulate)
    return Setup(build, ParallelConfig(), mesh, Precision(PrecisionConfig(), mesh.device), training)


class NoMeter:
    """Stands for the meter of a training, and measures nothing."""

    @contextmanager
    def spent(self, part: str) -> Iterator[None]:
        yield

    def report(self, counts: Mapping[str, float] | None = None) -> dict[str, float]:
        return {}

    evaluated = state_dict = report

    def begin(self, *_: Any) -> None:
        pass

    after_step = load_state_dict = close = begin


class Every(NamedTuple):
    """Steps from one log line or checkpoint to the next."""

    log: int
    checkpoint: int


def trainer_of(
    step: TrainStep,
    folder: Path,
    max_steps: int,
    every: Every,
    *,
    loader: Any = None,
    evaluations: Mapping[str, Any] = {},
    evaluate_every: int | None = 100,
    parts: Sequence[Part] = (),
    asked: Sequence[RequestedMetric] = (),
    **options: Any,
) -> Trainer:
    """Return a trainer of a step, which shows and tracks nothing; each rank has its own numbers."""
    schedule = Schedule(0.1, SchedulerConfig("constant"), max_steps)
    of_evaluation = Evaluations(step, evaluations, evaluate_every, asked)
    timer = next((each for each in step.exchange.asking if isinstance(each, Timer)), None)
    checkpointer = Checkpointer(folder, 9, here(), step.model, step.optimizer)
    given: dict[str, Any] = {
        "tracker": Tracker(),
        "display": Display(),
        "meter": NoMeter(),
        "states": {"precision": step.model.precision},
    }
    session = Stepping(
        feed=loader,
        saving=Saving(checkpointer, every.checkpoint, timer),
        exchange=step.exchange,
        stop=stop_of(step),
        health=step.health,
        max_steps=max_steps,
        log_every=every.log,
        parts=[step, *parts, of_evaluation, schedule],
        **(given | options),
    )
    of_evaluation.session = session
    return Trainer(session, step, schedule)


def stack_of_one_device(values: Sequence[torch.Tensor]) -> torch.Tensor:
    """Stack scalars as real devices do; tensors without values mix those of the host with others.

    It stands for `torch.stack`, which can be tested with two devices only on a machine with a GPU.
    """
    assert len({value.device for value in values}) == 1
    return _stack(list(values))


def weights(step: TrainStep) -> torch.Tensor:
    """Return all parameters as one vector."""
    return torch.cat([p.detach().flatten() for p in step.model.parameters])


def save_alone(state: dict[str, Any], folder: Path, base: str = "") -> None:
    """Save a state as the checkpoint of one rank, with its manifest."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        dcp.save(state, checkpoint_id=folder, no_dist=True)
    files = {path.name: facts(path) for path in folder.iterdir()}
    Manifest(1, 1, {}, files, 0.0, {}, base=base).write(folder)
