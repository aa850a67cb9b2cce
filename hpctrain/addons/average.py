"""The exponential moving average of the parameters (EMA), sharded as they are.

after each step    average = decay * average + (1 - decay) * parameters

Polyak & Juditsky 1992 average the iterates; the exponential form is that of Tarvainen & Valpola
2017 ("Mean teachers"). It has the parameters that are trained. Frozen ones are their own average,
and buffers, such as the statistics of a batch norm, are those of the model.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from hpctrain.engine.distributed.tensors import local
from hpctrain.engine.parallel.wrappers.parallel_model import ParallelModel
from hpctrain.engine.part import Part

_HALF = (torch.bfloat16, torch.float16)


class Average(Part):
    """The average of a model's parameters, which begins with their initial values.

    `decay` is the part of it that a step keeps. `tensors` has the average of each parameter that is
    trained, by its name: a DTensor where the parameter is one. It is fp32 for parameters in half
    precision, because a small part of a difference would be lost there.
    """

    name = "ema"

    def __init__(self, model: ParallelModel, decay: float) -> None:
        self._model, self._decay = model, decay
        named = zip(model.names, model.parameters, strict=True)
        self.tensors = {name: _copied(parameter) for name, parameter in named}
        self._local = [_local(tensor) for tensor in self.tensors.values()]

    @torch.no_grad()
    def after_update(self) -> None:
        """Take in the parameters after a step."""
        weight = 1 - self._decay
        pairs = list(zip(self._local, self._own(), strict=True))
        if alike := [pair for pair in pairs if pair[0].dtype == pair[1].dtype]:
            averages, values = map(list, zip(*alike, strict=True))
            torch._foreach_lerp_(averages, values, weight)
        for average, own in pairs:
            if average.dtype != own.dtype:  # one after the other: each takes a copy
                average.lerp_(own.to(average.dtype), weight)

    def state_dict(self) -> bool:
        """Return whether the checkpoint has an average."""
        return bool(self.tensors)

    def load_state_dict(self, state: bool) -> None:
        """Begin again at the present parameters if the checkpoint has no average."""
        if not state:
            self.restart()

    @torch.no_grad()
    def restart(self) -> None:
        """Begin again at the present parameters."""
        if self._local:
            torch._foreach_copy_(self._local, self._own())

    def finish(self) -> None:
        """Make the averages of replicas that differ equal after the last step of the run."""
        if self._model.replicas_differ:
            for tensor in self._local:
                dist.all_reduce(tensor)
                tensor /= self._model.mesh.dp_size

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Let the model have the average as its parameters."""
        if not self._local:
            yield
            return
        own = self._own()
        before = [tensor.clone() for tensor in own]
        self._replace(own, self._local)
        try:
            yield
        finally:
            self._replace(own, before)

    @torch.no_grad()
    def _replace(self, own: list[torch.Tensor], values: list[torch.Tensor]) -> None:
        torch._foreach_copy_(own, values)
        self._model.free_gathered()

    def _own(self) -> list[torch.Tensor]:
        return [_local(parameter) for parameter in self._model.parameters]


def _copied(parameter: torch.Tensor) -> torch.Tensor:
    values = parameter.detach()
    return values.float() if values.dtype in _HALF else values.clone()


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return local(tensor.detach())
