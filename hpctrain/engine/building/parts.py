"""What a config describes for a loop, on the ranks of a process group.

a training   an evaluation   a benchmark   an export of a graph
    └────────────┴── Parts ───────┴────────────┘
                       ├── mesh, precision
                       ├── data ── feeds
                       └── task ── model on its ranks
"""

from collections.abc import Sequence
from functools import cached_property, partial

import torch

from hpctrain.cluster.ranks.ranks import RankInfo
from hpctrain.config.rules.batch_sizes import BatchSizes, ramp_of
from hpctrain.config.rules.degrees import Degrees
from hpctrain.config.sections import LoopSections
from hpctrain.engine.building.build_data import DataBuilder
from hpctrain.engine.building.instantiate import instantiate
from hpctrain.engine.parallel.mesh import Mesh
from hpctrain.engine.parallel.precision import Precision
from hpctrain.engine.parallel.recipe import parallelize
from hpctrain.engine.parallel.setup import Build, Training
from hpctrain.engine.parallel.wrappers.parallel_model import ParallelModel
from hpctrain.engine.tasks.task import Task, bind, on_device, on_part


class Parts:
    """The parts of a config on one rank, whose device is `device`; all ranks make them together."""

    def __init__(self, config: LoopSections, ranks: RankInfo, device: torch.device) -> None:
        self.config, self.ranks, self.device = config, ranks, device
        degrees = Degrees.of(config.parallel, ranks.world_size)
        self.mesh = Mesh(degrees, ranks.rank, device, config.parallel.weights)
        self.precision = Precision(config.precision, device)
        sizes = ramp_of(config.train)
        self.data = DataBuilder(config.data, sizes, config.seed, self.mesh, config.cores)
        self.build: Build = partial(instantiate, "model", config.model)

    @cached_property
    def whole_task(self) -> Task:
        """The task for whole sequences."""
        made = instantiate("task", self.config.task, seed=self.config.seed)
        return on_device(bind(made, self.config.data.path), self.device)

    @cached_property
    def task(self) -> Task:
        """The task for this rank's part of each sequence."""
        return on_part(self.whole_task, self.mesh.sequence_part)

    def model(self, *, divided_loss: bool = True, trains: bool = True) -> ParallelModel:
        """Return a new model on its ranks, as the task calls it.

        With `divided_loss`, tensor parallel may leave the logits divided. What to know about a
        training is said only if the model `trains`.
        """
        loss_parallel = divided_loss and getattr(self.task, "loss_parallel", False)
        arguments = getattr(self.task, "arguments", ())
        training = training_of(self.config, self.mesh, loss_parallel, arguments, says=trains)
        return parallelize(self.build, self.config.parallel, self.mesh, self.precision, training)


def training_of(
    config: LoopSections,
    mesh: Mesh,
    loss_parallel: bool = False,
    arguments: Sequence[str] = (),
    *,
    says: bool = True,
) -> Training:
    """Return how the model of a config is trained on the ranks of a mesh."""
    sizes = BatchSizes.of(config.train, config.parallel, mesh.degrees)
    return Training(
        *(config.train, config.optimizer, config.seed),
        accumulate=sizes.accumulate * mesh.weight,
        norm=config.model.get("norm"),
        may_sync=lambda: config.may_sync(mesh.degrees),
        loss_parallel=loss_parallel,
        arguments=arguments,
        says=says,
    )
