"""Gradient compression for DDP: less is sent, and most kinds catch up on what they left out.

    gradient + error ── compress ── exchange ── mean over the ranks ── gradient of all ranks
                            └── what was not sent ── error of the next step (error feedback)

What a rank sends for a matrix of n = rows x columns elements, with W ranks in a ring:

    kind      bytes in each step, at most
    none      8 n
    powersgd  8 rank (rows + columns)
    topk      8 ratio n W                   less than "none" for up to 1 / ratio ranks
    int8      2 n

Each parameter is compressed by itself, because DDP regroups the parameters into other buckets after
the first step of a process, and a resumed run must equal an undisturbed one. (torch's own PowerSGD
keeps its state by bucket.) Errors have the units of the gradient before `scale_gradients`.
"""
# Without `from __future__ import annotations`: DDP checks the annotations of a hook as objects.

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch import nn
from torch.nn.functional import pad

from hpctrain.config.schema import CompressionConfig
from hpctrain.engine.distributed.tensors import wide

Future = torch.futures.Future[torch.Tensor]

_BLOCK = 256  # elements that int8 quantizes with one scale


def compression(config: CompressionConfig, module: nn.Module) -> "GradientCompression":
    """Return the compression that the config names; `module` is the model without DDP."""
    kinds: dict[str, Any] = {"powersgd": PowerSGD, "topk": TopK, "int8": Int8}
    made: GradientCompression = kinds[config.kind](config, module.named_parameters())
    return made


class GradientCompression(ABC):
    """A communication hook of DDP; `reduce` is called with each bucket in the same order."""

    def __init__(
        self, config: CompressionConfig, parameters: Iterable[tuple[str, nn.Parameter]]
    ) -> None:
        self.config = config
        self._names: dict[torch.Tensor, str] = {parameter: name for name, parameter in parameters}
        # What the next step depends on, by kind and parameter; only PowerSGD has a Q.
        self._held: dict[str, dict[str, torch.Tensor]] = {"error": {}, "q": {}}

    def reduce(self, bucket: dist.GradBucket) -> Future:
        """Replace the gradients of a bucket by their mean over the ranks, compressed."""
        return self._reduce(bucket)

    @abstractmethod
    def _reduce(self, bucket: dist.GradBucket) -> Future: ...

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

    def _named(self, bucket: dist.GradBucket) -> dict[str, torch.Tensor]:
        return {self._names[p]: p for p in bucket.parameters()}

    def _with_errors(self, bucket: dist.GradBucket) -> torch.Tensor:
        """Return the gradients and the errors of before added up: new, flat, float32 or float64."""
        gradients = wide(bucket.buffer())
        errors = [
            self.errors[name] if name in self.errors else gradients.new_zeros(p.numel())
            for name, p in self._named(bucket).items()
        ]
        return gradients + torch.cat(errors)

    def _keep(self, bucket: dist.GradBucket, errors: torch.Tensor) -> None:
        named = self._named(bucket)
        self.errors.update(zip(named, errors.split(_sizes(named.values())), strict=True))


class TopK(GradientCompression):
    """The largest elements of each parameter, with error feedback.

    Stich et al., "Sparsified SGD with Memory" (2018); Lin et al., "Deep Gradient Compression"
    (2018).
    """

    def _reduce(self, bucket: dist.GradBucket) -> Future:
        total, ratio = self._with_errors(bucket), self.config.ratio
        chosen, start = [], 0
        for part in total.split(_sizes(bucket.parameters())):
            count = max(1, round(ratio * len(part)))
            chosen.append(part.abs().topk(count, sorted=False).indices + start)
            start += len(part)
        places = torch.cat(chosen)
        values = total[places]
        self._keep(bucket, total.index_fill_(0, places, 0.0))

        def mean(messages: torch.Tensor) -> torch.Tensor:
            result = torch.zeros_like(total)
            for message in messages.view(torch.int32):  # a place occurs once in each message
                numbers, indices = message.tensor_split([-len(places)])
                # A copy, since numbers in the middle of a message need not be aligned.
                result.index_add_(0, indices, numbers.clone().view(total.dtype))
            return result / len(messages)

        return _gather(bucket, torch.cat([values.view(torch.int32), places.int()]), mean)


class Int8(GradientCompression):
    """Integers of 8 bits with a scale for each 256 elements, without error feedback.

    Each rank adds up one part of the elements and sends the mean in 8 bits, too: the quantized
    all-to-all of Wang et al., "ZeRO++" (2023); Dettmers, "8-Bit Approximations for Parallelism in
    Deep Learning" (2016). An element is wrong by at most a 127th of the largest in its block.
    """

    def _reduce(self, bucket: dist.GradBucket) -> Future:
        buffer, ranks = bucket.buffer(), dist.get_world_size()
        sizes = _sizes(bucket.parameters())
        padded = [pad(wide(part), (0, -len(part) % _BLOCK)) for part in buffer.split(sizes)]
        blocks = torch.cat(padded).view(-1, _BLOCK)
        count = len(blocks)
        sent = _quantized(pad(blocks, (0, 0, 0, -count % ranks)))
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent)
        own = _dequantized(received, blocks.dtype).view(ranks, -1, _BLOCK)

        def result(messages: torch.Tensor) -> torch.Tensor:
            rows = messages.view(-1, sent.shape[1])
            means = _dequantized(rows, blocks.dtype)[:count].flatten()
            parts = means.split([len(part) for part in padded])
            return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])

        return _gather(bucket, _quantized(own.mean(0)).flatten(), result)


class PowerSGD(GradientCompression):
    """Two narrow matrices P and Q, whose product is near the mean gradient, with error feedback.

    Vogels et al., "PowerSGD: Practical Low-Rank Gradient Compression" (2019). Each step is one of a
    power iteration, which starts from the Q of the step before. A parameter is the matrix of its
    first dimension and all others; it is sent whole if that is less. The products need the mean of
    P before Q, so the hook waits for its reductions. Q is the same on all ranks.
    """

    def _reduce(self, bucket: dist.GradBucket) -> Future:
        total = self._with_errors(bucket)
        named = self._named(bucket)
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
        self._keep(bucket, total)
        future: Future = torch.futures.Future()
        future.set_result(bucket.buffer().copy_(torch.cat([means[name] for name in flat])))
        return future

    def _is_divided(self, parameter: torch.Tensor) -> bool:
        """Return whether P and Q are smaller than the parameter."""
        if parameter.ndim < 2:
            return False
        rows, size = len(parameter), parameter.numel()
        return self.config.rank * (rows + size // rows) < size

    def _first(self, name: str, matrix: torch.Tensor) -> torch.Tensor:
        """Return Q of the step before, or a random one that is the same on all ranks."""
        known = self._held["q"]
        if name not in known:
            draw = torch.Generator().manual_seed(xxhash.xxh32_intdigest(name.encode()))
            q = torch.randn(matrix.shape[1], self.config.rank, generator=draw)
            known[name] = q.to(matrix)
        return known[name]


def _sizes(parameters: Iterable[torch.Tensor]) -> list[int]:
    return [parameter.numel() for parameter in parameters]


def _gather(
    bucket: dist.GradBucket, message: torch.Tensor, mean: Callable[[torch.Tensor], torch.Tensor]
) -> Future:
    """Send a message to all ranks; fill the bucket by `mean` of theirs, of shape (ranks, ...)."""
    buffer = bucket.buffer()
    messages = message.new_empty((dist.get_world_size(), *message.shape))
    work = dist.all_gather_into_tensor(messages.view(-1), message, async_op=True)
    future: Future = work.get_future().then(lambda _: buffer.copy_(mean(messages)))
    return future


def _average(tensors: list[torch.Tensor]) -> None:
    """Replace tensors by their means over the ranks, in place, by one reduction."""
    if not tensors:
        return
    together = torch.cat([tensor.flatten() for tensor in tensors])
    dist.all_reduce(together)
    together /= dist.get_world_size()
    for tensor, part in zip(tensors, together.split(_sizes(tensors)), strict=True):
        tensor.copy_(part.view_as(tensor))


def _quantized(blocks: torch.Tensor) -> torch.Tensor:
    """Return int8 of shape (n, _BLOCK + 4), or + 8: the last bytes of a row are its scale."""
    scales = blocks.abs().amax(1, keepdim=True) / 127
    numbers = (blocks / scales.clamp(min=torch.finfo(scales.dtype).tiny)).round()
    return torch.cat([numbers.to(torch.int8), scales.view(torch.int8)], 1)


def _dequantized(rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the blocks (n, _BLOCK) of a dtype for the rows of `_quantized`."""
    return rows[:, :_BLOCK] * rows[:, _BLOCK:].contiguous().view(dtype)
