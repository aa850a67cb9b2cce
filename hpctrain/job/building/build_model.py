"""Builds the task and the model of a config on the ranks: for a training and for a trained run."""

from __future__ import annotations

from functools import partial

from hpctrain.config.schema import Config
from hpctrain.job.building.make import make
from hpctrain.parallel.mesh import Mesh
from hpctrain.parallel.precision import Precision
from hpctrain.parallel.recipe import parallelize
from hpctrain.parallel.wrappers.parallel_model import ParallelModel
from hpctrain.tasks import Task, bind


def build_task(config: Config) -> Task:
    """Return the task for whole sequences."""
    return bind(make("task", config.task), config.data.path)


def build_model(
    config: Config, mesh: Mesh, precision: Precision, task: Task, *, divided_loss: bool = True
) -> ParallelModel:
    """Return a new model on its ranks, as the task calls it; all ranks call this together.

    With `divided_loss`, tensor parallel may leave the logits divided.
    """
    return parallelize(
        partial(make, "model", config.model),
        config,
        mesh,
        precision,
        loss_parallel=divided_loss and getattr(task, "loss_parallel", False),
        arguments=getattr(task, "arguments", ()),
    )
