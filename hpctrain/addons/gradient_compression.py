"""PowerSGD for DDP: gradients are compressed, and a later step catches up on what was left out.

    gradient + error ── compress ── exchange ── mean over the ranks ── gradient of all ranks
                            └── what was not sent ── error of the next step (error feedback)

For a matrix of rows x columns a rank sends 8 rank (rows + columns) bytes in a ring of ranks, in
place of 8 rows x columns.

Each parameter is compressed by itself, because DDP regroups the parameters into other buckets after
the first step of a process, and a resumed run must equal an undisturbed one. (torch's own PowerSGD
keeps its state by bucket.) Errors have the units of the gradient before `scale_gradients`.
"""
# Without `from __future__ import annotations`: DDP checks the annotations of a hook as objects.

from collections.abc import Iterable

import torch
import torch.distributed as dist
import xxhash
from torch import nn

from hpctrain.engine.distributed.tensors import wide


class PowerSGD:
    """Two narrow matrices P and Q, whose product is near the mean gradient, with error feedback.

    Vogels et al., "PowerSGD: Practical Low-Rank Gradient Compression" (2019). Each step is one of a
    power iteration, which starts from the Q of the step before. A parameter is the matrix of its
    first dimension and all others; it is sent whole if that is less. The products need the mean of
    P before Q, so the hook waits for its reductions. Q is the same on all ranks.

    `reduce` is a communication hook of DDP, called with each bucket in the same order. P and Q have
    `rank` columns; the parameters have the names of the model without DDP.
    """

    def __init__(self, rank: int, parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
        self._rank = rank
        self._names: dict[torch.Tensor, str] = {parameter: name for name, parameter in parameters}
        # What the next step depends on, by kind and parameter.
        self._held: dict[str, dict[str, torch.Tensor]] = {"error": {}, "q": {}}

    def reduce(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Replace the gradients of a bucket by their mean over the ranks, compressed."""
        named: dict[str, torch.Tensor] = {self._names[p]: p for p in bucket.parameters()}
        gradients = wide(bucket.buffer())
        left_out = [
            self.errors[name] if name in self.errors else gradients.new_zeros(p.numel())
            for name, p in named.items()
        ]
        total = gradients + torch.cat(left_out)
        flat = dict(zip(named, total.split(_sizes(named.values())), strict=True))
        matrices = {n: flat[n].view(len(p), -1) for n, p in named.items() if self._is_divided(p)}
        means = {name: part.clone() for name, part in flat.items() if name not in matrices}
        left = [m @ self._first(name, m) for name, m in matrices.items()]
        _average([*means.values(), *left])
        left = [torch.linalg.qr(p).Q for p in left]
        right = [m.T @ p for m, p in zip(matrices.values(), left, strict=True)]
        _average(right)
        self._held["q"].update(zip(matrices, right, strict=True))
        for name, p, q in zip(matrices, left, right, strict=True):
            means[name] = (p @ q.T).flatten()
        for name, part in flat.items():
            if name in matrices:
                part.sub_(means[name])
            else:
                part.zero_()
        self.errors.update(flat)
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer().copy_(torch.cat([means[name] for name in flat])))
        return future

    @property
    def errors(self) -> dict[str, torch.Tensor]:
        """What has not been sent yet, by the name of the parameter: flat, float32 or float64."""
        return self._held["error"]

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return the tensors of this rank that the next step depends on."""
        return {f"{kind}.{n}": t for kind, held in self._held.items() for n, t in held.items()}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Continue with what `state_dict` returned."""
        devices = {name: parameter.device for parameter, name in self._names.items()}
        for held in self._held.values():
            held.clear()
        for key, value in state.items():
            kind, _, name = key.partition(".")
            self._held[kind][name] = value.to(devices[name])

    def _is_divided(self, parameter: torch.Tensor) -> bool:
        """Return whether P and Q are smaller than the parameter."""
        if parameter.ndim < 2:
            return False
        rows, size = len(parameter), parameter.numel()
        return self._rank * (rows + size // rows) < size

    def _first(self, name: str, matrix: torch.Tensor) -> torch.Tensor:
        """Return Q of the step before, or a random one that is the same on all ranks."""
        known = self._held["q"]
        if name not in known:
            draw = torch.Generator().manual_seed(xxhash.xxh32_intdigest(name.encode()))
            q = torch.randn(matrix.shape[1], self._rank, generator=draw)
            known[name] = q.to(matrix)
        return known[name]


def _sizes(parameters: Iterable[torch.Tensor]) -> list[int]:
    return [parameter.numel() for parameter in parameters]


def _average(tensors: list[torch.Tensor]) -> None:
    """Replace tensors by their means over the ranks, in place, by one reduction."""
    if not tensors:
        return
    together = torch.cat([tensor.flatten() for tensor in tensors])
    dist.all_reduce(together)
    together /= dist.get_world_size()
    for tensor, part in zip(tensors, together.split(_sizes(tensors)), strict=True):
        tensor.copy_(part.view_as(tensor))
