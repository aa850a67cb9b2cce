"""What is known before a model is spread: how it is trained, and what the config decides."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hpctrain.config.schema import OptimizerConfig, ParallelConfig, TrainConfig
from hpctrain.engine.parallel.mesh import Mesh
from hpctrain.engine.parallel.precision import Precision
from hpctrain.engine.parallel.preparing.whole_model import with_adapters

Build = Callable[[], nn.Module]


@dataclass(frozen=True)
class Training:
    """How a model is trained, beside its layout and its formats.

    Attributes:
        seed: What initial values are drawn from.
        accumulate: The micro-batches of this rank.
        norm: The kind of the model's norm, if its config names one, for an advice.
        may_sync: Returns whether `train.sync_batchnorm` is possible, for an advice.
        loss_parallel: Whether the task computes the loss from logits that tensor parallel divides.
        arguments: Those of the model that the task's inputs after the first are for; none if the
            task says nothing.
        says: Whether rank 0 says what to know about a training. A model may only evaluate.
        ours: Whether our loop trains it. One in a loop of the user's may have no blocks, and need
            not be trained.
    """

    train: TrainConfig
    optimizer: OptimizerConfig
    seed: int = 0
    accumulate: int = 1
    norm: Any = None
    may_sync: Callable[[], bool] = bool
    loss_parallel: bool = False
    arguments: Sequence[str] = ()
    says: bool = True
    ours: bool = True


@dataclass
class Setup:
    """What the config decides.

    `build` is called on the meta device, too; or it is a module that every rank has built.

    Attributes:
        storage: The device of the parameters.
        whole: Whether each rank has all parameters and gradients.
        changes: Whether modules are divided, or compute in another way.
    """

    build: Build
    parallel: ParallelConfig
    mesh: Mesh
    precision: Precision
    training: Training

    def __post_init__(self) -> None:
        build, parallel, degrees = self.build, self.parallel, self.mesh.degrees
        self.train = train = self.training.train
        self.accumulate = self.training.accumulate
        if train.lora.patterns:
            self.build = lambda: with_adapters(build(), train.lora)
        self.storage = torch.device("cpu") if parallel.fsdp.offload else self.precision.device
        self.divided_loss = (
            self.training.loss_parallel and parallel.loss_parallel and degrees.tp > 1
        )
        divided = degrees.ranks > degrees.dp_replicate or parallel.fsdp.offload or parallel.ep > 1
        self.whole = not divided
        computes = train.activation_checkpointing != "none" or train.compile != "off"
        computes |= bool(train.lora.quantize) or self.precision.compute == "fp8"
        self.changes = divided or computes
