"""The device prefetcher: batches are transformed on the device before the training needs them.

    loader ── pinned buffers ── copy ── transform ─┐   on a stream of its own
                                                   ├── event ── the step
    step k-1 ──────────────────────────────────────┘   on the stream of the training

On a GPU the copies and transforms of the next batches run beside the step, as many as fit in
`ahead_bytes`; the host never waits for them. A pinned buffer goes back to the loader when its copy
is done. The memory of a batch on the device is free when the training's stream has passed the step.
On the CPU nothing is copied: a batch is transformed when the training needs it.

The state counts the batches that the training has been given, not those that are prefetched.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from hpctrain.data.draws import Draws
from hpctrain.data.loading.loader import Loader
from hpctrain.data.loading.steps import Step
from hpctrain.data.shards.types import Batch
from hpctrain.data.source import SampleId
from hpctrain.data.transforms import Transform

_PENDING = 256  # steps whose events are kept until somebody asks


class DevicePrefetcher:
    """Iterates over a loader's batches on a device.

    To a GPU batches of `ahead_bytes`, as they come from the loader, are prefetched; at least one
    is. `close` calls `closes`, to close what the loader reads from.

    `wait_s` is how long the training has waited for data. On the CPU this is the time in `next()`;
    on a GPU it is the time in which the training's stream had nothing to do because a batch was not
    there.
    """

    def __init__(
        self,
        loader: Loader,
        device: torch.device,
        transform: Transform | None = None,
        *,
        seed: int = 0,
        ahead_bytes: int = 256 * 2**20,
        closes: Sequence[Callable[[], None]] = (),
    ) -> None:
        self.loader, self._device, self._transform = loader, device, transform
        self.steps, self.steps_per_epoch = loader.steps, loader.steps_per_epoch
        self._seed, self._ahead_bytes, self._closes = seed, ahead_bytes, closes
        self._consumed = loader.state_dict()["consumed"]
        self._given: Step | None = None  # the step of the batch that the training was given last
        self._waits: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()
        self._waited_s = 0.0

    @property
    def epoch(self) -> int:
        """The number of whole epochs given to the training."""
        return self._consumed // self.loader.count

    @property
    def wait_s(self) -> float:
        """See the class; on a GPU only steps that are over count."""
        self._read_waits()
        return self._waited_s + (self.loader.wait_s if self._device.type != "cuda" else 0.0)

    def _read_waits(self, pending: int = 0) -> None:
        """Read the events of the steps that are over, while there are more than `pending`."""
        while len(self._waits) > pending and all(event.query() for event in self._waits[0]):
            asked, there = self._waits.popleft()
            self._waited_s += max(0.0, asked.elapsed_time(there) / 1000)

    def state_dict(self) -> dict[str, int]:
        """See `Loader.state_dict`."""
        return {"consumed": self._consumed}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """See `Loader.load_state_dict`."""
        self.loader.load_state_dict(state)
        self._consumed = self.loader.state_dict()["consumed"]

    @property
    def last(self) -> Step:
        """The step whose batch the training was given last. Keeping it keeps no batch."""
        if self._given is None:
            raise RuntimeError("the training has not been given a batch yet")
        return self._given

    def samples(self, step: Step | None = None) -> list[SampleId]:
        """See `Loader.samples`; it costs nothing until it is asked."""
        return self.loader.samples(step or self.last)

    def close(self) -> None:
        """End worker processes, and release staged shards."""
        for close in self._closes:
            close()

    def __iter__(self) -> Iterator[Batch]:
        # Batches that the iterator before had prefetched, but not given, are read again.
        self.loader.load_state_dict(self.state_dict())
        return self._on_gpu() if self._device.type == "cuda" else self._here()

    def _here(self) -> Iterator[Batch]:
        for batch in self.loader:
            step = self.loader.last
            made = self._transformed(batch, step)
            self._consumed, self._given = step.consumed, step
            yield made

    def _transformed(self, batch: Batch, step: Step) -> Batch:
        if self._transform is None:
            return batch
        return self._transform(batch, Draws(self._seed, step.group.epoch, step.positions))

    def _on_gpu(self) -> Iterator[Batch]:
        stream = torch.cuda.Stream(self._device)
        current = torch.cuda.current_stream(self._device)
        batches = iter(self.loader)
        ahead: deque[_Sent] = deque()
        copying: deque[_Sent] = deque()  # the copies still read their pinned buffers
        on_the_way, size = 0, 1
        try:
            while True:
                while copying and copying[0].copied.query():
                    copying.popleft().host.clear()
                # Recorded before the host waits for the loader: the stream may run empty meanwhile.
                asked = torch.cuda.Event(enable_timing=True)
                asked.record(current)
                # The host waits for the first batch only; others are sent if they have been read.
                while not ahead or (on_the_way + size <= self._ahead_bytes and self.loader.ready):
                    batch = next(batches, None)
                    if batch is None:
                        break
                    sent = self._send(batch, stream)
                    del batch
                    size = sent.size
                    on_the_way += size
                    ahead.append(sent)
                    copying.append(sent)
                if not ahead:
                    return
                sent = ahead.popleft()
                on_the_way -= sent.size
                current.wait_event(sent.there)
                self._waits.append((asked, sent.there))
                self._read_waits(_PENDING)  # nobody may ask for `wait_s` for long
                for value in sent.batch.values():
                    value.record_stream(current)
                self._consumed, self._given = sent.step.consumed, sent.step
                yield sent.batch
        finally:  # the consumer may leave early: pinned buffers must outlive their copies
            stream.synchronize()

    def _send(self, host: Batch, stream: torch.cuda.Stream) -> "_Sent":
        copied, there = torch.cuda.Event(), torch.cuda.Event(enable_timing=True)
        with torch.cuda.stream(stream):
            batch = {name: x.to(self._device, non_blocking=True) for name, x in host.items()}
            copied.record(stream)
            # A transform may have made tensors of the CPU.
            made = self._transformed(batch, self.loader.last).items()
            batch = {name: x.to(self._device) for name, x in made}
            there.record(stream)
        size = sum(value.nbytes for value in host.values())
        return _Sent(batch, host, size, copied, there, self.loader.last)


class _Sent(NamedTuple):
    """A batch that is prefetched to the device."""

    batch: Batch
    host: Batch
    size: int
    copied: torch.cuda.Event
    there: torch.cuda.Event
    step: Step
