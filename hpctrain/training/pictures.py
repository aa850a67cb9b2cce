"""A hook that draws what a model of fields predicts: truth, prediction and error.

hooks:
  - {_target_: hpctrain.training.pictures.Pictures}
"""

import logging
from typing import Any

import torch.distributed as dist

from hpctrain.training.hooks import Hook, RunState

log = logging.getLogger(__name__)


class Pictures(Hook):
    """After each evaluation, a figure of the sample that the task has kept.

    A task with pictures has an attribute `shown`: the target and the prediction, float32
    (channels, height, width), or None. `hpctrain.tasks.Evolution` is one.

    Args:
        channel: Number of the channel, from 0.
    """

    def __init__(self, channel: int = 0) -> None:
        self._channel = channel

    def after_evaluation(self, state: RunState) -> None:
        """Draw the sample of rank 0, whose tracker keeps the figure."""
        shown: Any = getattr(state.task, "shown", None)
        if shown is None or dist.get_rank() > 0:
            return
        truth, found = (each[self._channel].cpu().numpy() for each in shown)
        if truth.ndim != 2:
            log.warning("no picture: the fields have %d dimensions, not 2", truth.ndim)
            return
        state.tracker.log_figure("prediction", _figure(truth, found, state.step), state.step)


def _figure(truth: Any, found: Any, step: int) -> Any:
    from matplotlib.figure import Figure  # without pyplot, which would keep the figure

    figure = Figure(figsize=(12, 3.6), layout="constrained")
    error = found - truth
    largest, worst = (float(abs(x).max()) or 1.0 for x in (truth, error))
    parts = (("truth", truth, largest), ("prediction", found, largest), ("error", error, worst))
    for axes, (title, values, limit) in zip(figure.subplots(1, 3), parts, strict=True):
        image = axes.imshow(values, cmap="RdBu_r", vmin=-limit, vmax=limit, origin="lower")
        axes.set(title=f"{title}, step {step}", xticks=[], yticks=[])
        figure.colorbar(image, ax=axes)
    return figure
