"""Optimizers with `train()` and `eval()`: they train one set of weights and evaluate another.

    train()   the weights that get gradients (y of Defazio et al. 2024, "The Road Less Scheduled")
    eval()    the weights that are evaluated, saved and used (their average x)

Between two steps an evaluation or a save takes the second set. After it the first set is back bit
by bit, because `train()` alone would leave rounding, and a run that is evaluated more often would
be another one.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from hpctrain.engine.distributed.tensors import local


class OptimizerModes:
    """The two modes of optimizers; one without them has the same weights for everything.

    `changed` is called after the `parameters`, by name, were changed outside of a step. While other
    weights are evaluated or saved, `training` has those that are trained; it is empty without
    modes.
    """

    def __init__(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        parameters: Mapping[str, torch.nn.Parameter],
        changed: Callable[[], None],
    ) -> None:
        pairs = [[getattr(o, name, None) for name in ("train", "eval")] for o in optimizers]
        self._switches: list[list[Any]] = [pair for pair in pairs if all(map(callable, pair))]
        self._changed, self._parameters = changed, parameters
        self.training: dict[str, torch.Tensor] = {}

    def train(self) -> None:
        """Begin the training; the parameters are those that `eval()` has left, or initial ones."""
        self._call(0)

    def empty(self) -> dict[str, torch.Tensor]:
        """Return tensors to load saved `training` weights into."""
        return {n: torch.empty_like(p, requires_grad=False) for n, p in self._parameters.items()}

    def restore(self, training: Mapping[str, torch.Tensor]) -> None:
        """Go on with what was saved as `training`, in `eval()`'s place; it may be empty."""
        self._call(0)
        self._set(training)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Let the parameters be those that are evaluated and saved."""
        if not self._switches:
            yield
            return
        self.training = {name: p.detach().clone() for name, p in self._parameters.items()}
        self._call(1)
        try:
            yield
        finally:
            self._call(0)
            self._set(self.training)
            self.training = {}

    def _call(self, mode: int) -> None:
        """Let the optimizers train (0) or evaluate (1)."""
        for switches in self._switches:
            switches[mode]()
        if self._switches:
            self._changed()

    @torch.no_grad()
    def _set(self, values: Mapping[str, torch.Tensor]) -> None:
        for name, value in values.items():
            local(self._parameters[name].detach()).copy_(local(value.detach()))
        self._changed()
