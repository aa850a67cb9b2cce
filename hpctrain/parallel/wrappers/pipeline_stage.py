"""A stage of torch's pipelines, as this pipeline has it, and the clock of its computations."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.pipelining import PipelineStage

from hpctrain.parallel.reducing.expert_loads import Loads


class Clock:
    """Measures how long a rank computes during a step, and how long the step takes.

    As a context it measures one computation. On a GPU these are times of its stream. They are read
    when the GPU has passed them, so that no step waits.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda, self._skipped = device.type == "cuda", False
        self._begin: Any = None
        self._busy: list[tuple[Any, Any]] = []
        self._steps: list[list[tuple[Any, Any]]] = []

    def __enter__(self) -> None:
        self._begin = self._now()

    def __exit__(self, *_: object) -> None:
        self._busy.append((self._begin, self._now()))

    def skip(self) -> None:
        """Leave out the next step."""
        self._skipped = True

    @contextmanager
    def step(self, counts: bool) -> Iterator[None]:
        """Measure a step; `counts` tells whether `read` shall return it."""
        self._busy, begin = [], self._now()
        yield
        if counts and not self._skipped:
            self._steps.append([(begin, self._now()), *self._busy])
        self._skipped = False

    def read(self) -> list[float]:
        """Return once the seconds without computation, and all seconds, of steps that are over."""
        idle = total = 0.0
        while self._steps and (not self._cuda or self._steps[0][0][1].query()):
            whole, *busy = (self._seconds(*times) for times in self._steps.pop(0))
            idle, total = idle + whole - sum(busy), total + whole
        return [idle, total]

    def _now(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _seconds(self, begin: Any, end: Any) -> float:
        return float(begin.elapsed_time(end) / 1000 if self._cuda else end - begin)


class Stage(PipelineStage):
    """A stage of torch that measures its computations and can be evaluated by zbv.

    It also begins the loads of the experts anew in each pass.
    """

    clock: Clock
    loads: Loads
    whole: set[int]

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Make the forward pass of a micro-batch."""
        if fwd_chunk_id == 0:  # the passes by which torch learns shapes do not count
            self.loads.start()
        with self.clock:
            return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(
        self,
        bwd_chunk_id: int,
        loss: Any = None,
        full_backward: bool = True,
        last_backward: Any = False,
    ) -> Any:
        """Make the backward pass of a micro-batch, or its first half."""
        if self.has_backward and not full_backward and not self.is_first:
            # torch finds the weights of the second half on the way from the outputs to inputs that
            # need a gradient. There are none if all stages before this one are frozen.
            inputs = self.fwd_cache[bwd_chunk_id][1]
            full_backward = not any(isinstance(x, torch.Tensor) and x.requires_grad for x in inputs)
            if full_backward:
                self.whole.add(bwd_chunk_id)
        with self.clock:
            return super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: Any = False) -> Any:
        """Make the second half of the backward pass of a micro-batch."""
        if bwd_chunk_id in self.whole:
            self.whole.remove(bwd_chunk_id)
            return None
        with self.clock:
            return super().backward_weight_one_chunk(bwd_chunk_id, last_backward)

    def get_local_bwd_output(self, mb_index: int) -> Any:
        """Return the gradient of the input; in an evaluation torch asks for it and raises."""
        if not self.has_backward:
            return ()
        return super().get_local_bwd_output(mb_index)  # type: ignore[no-untyped-call]

    def set_local_bwd_input(self, next_stage_bwd_outputs: Any, mb_index: int) -> None:
        """Take the gradient of the output from the next stage, which is on the same rank."""
        if self.has_backward:
            super().set_local_bwd_input(next_stage_bwd_outputs, mb_index)

    def perform_reduce_grad(self, *args: Any, **kwargs: Any) -> Any:
        """Reduce the gradients over the data-parallel ranks."""
        with self.clock:
            return super().perform_reduce_grad(*args, **kwargs)
