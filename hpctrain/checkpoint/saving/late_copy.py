"""Copies that are made while the next step computes, and end before it changes what they copy.

    save    what a forward pass may change is copied at once; parameters, their averages and the
            states of the optimizer are left to a thread, or to a stream of the GPU
    step    forward ── backward ── wait for the rest of the copy ── optimizer

A model may change parameters in its forward pass, as `nn.Embedding(max_norm=1.0)` does. So the
first save of a tensor copies it at once, and the step after it shows whether it keeps its bits
until the optimizer. One that changes in a later step is seen by its version; that save is given up.
"""

from collections.abc import Callable, Collection, Sequence
from threading import Thread

import torch

from hpctrain.checkpoint.saving.shared_memory import Pair

CHANGED = "the model has changed a parameter in its forward pass, while it was copied"


class LateCopy:
    """Copies tensors of one save at a time; `torn` if one was changed meanwhile."""

    def __init__(self) -> None:
        self.torn = False
        self._steady: dict[int, bool] = {}  # by address, what a step has shown
        self._sums: list[tuple[torch.Tensor, int]] = []  # before that step
        self._copied: list[tuple[torch.Tensor, tuple[int, int]]] = []
        self._thread = Thread()
        self._event: torch.cuda.Event | None = None
        self._then: Callable[[], None] | None = None

    def chosen(self, tensors: Sequence[torch.Tensor], storages: Collection[int]) -> list[bool]:
        """Return which tensors, in `storages` or not, are copied late: none at its first save."""
        able = [t.untyped_storage().data_ptr() in storages and _can_be_summed(t) for t in tensors]
        pairs = [*zip(tensors, able, strict=True)]
        new = [t for t, is_able in pairs if is_able and t.data_ptr() not in self._steady]
        self._sums = [(tensor, _sum(tensor)) for tensor in new]
        return [is_able and self._steady.get(t.data_ptr(), False) for t, is_able in pairs]

    def begin(self, pairs: Sequence[Pair], then: Callable[[], None]) -> None:
        """Begin to copy tensors to memory of the host, pinned for a GPU; call `then` after it."""
        self.torn, self._copied = False, [(tensor, _mark(tensor)) for _, tensor in pairs]
        if on_gpu := [pair for pair in pairs if pair[1].is_cuda]:
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for place, tensor in on_gpu:
                    place.copy_(tensor, non_blocking=True)
            # A thread that asks a GPU would disturb a graph that the training captures.
            self._event, self._then, then = stream.record_event(), then, lambda: None
        here = [pair for pair in pairs if not pair[1].is_cuda]
        self._thread = Thread(target=self._copy, args=(here, then), name="hpctrain-copy")
        self._thread.start()

    def _copy(self, pairs: Sequence[Pair], then: Callable[[], None]) -> None:
        try:
            if pairs:
                torch._foreach_copy_([place for place, _ in pairs], [own for _, own in pairs])
        except RuntimeError:  # its memory was freed
            self.torn = True
        then()

    def is_done(self) -> bool:
        """Return whether all is copied, and `settle` has seen that nothing was changed."""
        if self._copied or (self._event is not None and not self._event.query()):
            return False
        if self._then is not None:
            self._then()
        self._event = self._then = None
        return True

    def settle(self) -> None:
        """Let what changes the tensors wait for the copy, if there is one."""
        self._steady |= {t.data_ptr(): _sum(t) == before for t, before in self._sums}
        self._sums = []
        if self._copied:
            self._thread.join()
            if self._event is not None:
                torch.cuda.current_stream().wait_event(self._event)
            self.torn |= any(_mark(tensor) != mark for tensor, mark in self._copied)
            if self.torn:
                self._steady = dict.fromkeys(self._steady, False)
            self._copied = []


def _mark(tensor: torch.Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), tensor._version


def _can_be_summed(tensor: torch.Tensor) -> bool:
    aligned = tensor.data_ptr() % 8 == tensor.nbytes % 8 == 0 < tensor.nbytes
    return aligned and tensor.is_contiguous() and not tensor.is_inference()


def _sum(tensor: torch.Tensor) -> int:
    """Return the sum of the bits as integers, which is soon known, and no NaN."""
    return int(tensor.view(-1).view(torch.int64).sum())
