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
    """The two modes of an optimizer; one without them has the same weights for everything.

    `changed` is called after the parameters were changed outside of a step. While other weights are
    evaluated or saved, `training` has those that are trained, by name; it is empty without modes.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        names: Sequence[str],
        parameters: Sequence[torch.nn.Parameter],
        changed: Callable[[], None],
    ) -> None:
        train, evaluate = (getattr(optimizer, name, None) for name in ("train", "eval"))
        self._has = callable(train) and callable(evaluate)
        self._train, self._eval, self._changed = train, evaluate, changed
        self._parameters = dict(zip(names, parameters, strict=True))
        self.training: dict[str, torch.Tensor] = {}

    def train(self) -> None:
        """Begin the training; the parameters are those that `eval()` has left, or initial ones."""
        self._call(self._train)

    def empty(self) -> dict[str, torch.Tensor]:
        """Return tensors to load saved `training` weights into."""
        return {n: torch.empty_like(p, requires_grad=False) for n, p in self._parameters.items()}

    def restore(self, training: Mapping[str, torch.Tensor]) -> None:
        """Go on with what was saved as `training`, in `eval()`'s place; it may be empty."""
        self._call(self._train)
        self._set(training)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Let the parameters be those that are evaluated and saved."""
        if not self._has:
            yield
            return
        self.training = {name: p.detach().clone() for name, p in self._parameters.items()}
        self._call(self._eval)
        try:
            yield
        finally:
            self._call(self._train)
            self._set(self.training)
            self.training = {}

    def _call(self, switch: Any) -> None:
        if self._has:
            switch()
            self._changed()

    @torch.no_grad()
    def _set(self, values: Mapping[str, torch.Tensor]) -> None:
        for name, value in values.items():
            local(self._parameters[name].detach()).copy_(local(value.detach()))
        self._changed()
