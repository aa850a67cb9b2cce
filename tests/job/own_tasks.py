"""A task whose loss changes during a training, for tests of runs that go on."""

from typing import Any

import torch

from hpctrain.data.shards.types import Batch
from hpctrain.tasks import Classification, Sums


class Annealed(Classification):
    """Weighs the loss by the step that it is told, and by the batches that it has counted."""

    step, batches = 0, 0

    def at_step(self, step: int) -> None:
        self.step = step

    def sums(self, outputs: Any, batch: Batch) -> Sums:
        found = super().sums(outputs, batch)
        loss, count = found["loss"]
        found["loss"] = loss * (1 + 0.01 * self.step + 0.02 * self.batches), count
        self.batches += torch.is_grad_enabled()
        return found

    def state_dict(self) -> dict[str, Any]:
        return {"batches": self.batches}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.batches = state["batches"]
