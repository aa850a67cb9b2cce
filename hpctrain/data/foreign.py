"""Batches that are not ours: whatever a loop of one's own goes through, with a position.

    >>> batches = ForeignBatches(loader)   # a DataLoader, a list, a function that makes a generator
    >>> for batch in batches:              # without end: at its end it begins anew
    ...     step(batch)
    ...     save(batches.state_dict())     # after batch k: goes on with batch k + 1

What has `state_dict` and `load_state_dict`, as torchdata's StatefulDataLoader, is put back by them.
Of all else the position is the epoch and the number of its batches: what was used is read again,
and thrown away. The batches that follow are those of the undisturbed run if an epoch that begins
with the same random numbers gives the same batches. So each epoch begins with global generators
that its number and the seed of the run decide; torch's generators that a DataLoader and its
samplers have get the states of then; and `set_epoch` is called on what has it. Only the random
numbers within workers may be others after that: those of workers that live on from epoch to epoch
(`persistent_workers`), and those that the state of a StatefulDataLoader does not have.
"""

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar

import numpy as np
import torch
import xxhash

from hpctrain.base.errors import DataError
from hpctrain.base.terminal.terminal import few
from hpctrain.data.generators import seeded_generators

log = logging.getLogger(__name__)
T = TypeVar("T")
_END: Any = object()  # what follows the last batch of an epoch


class ForeignBatches(Generic[T]):
    """Goes through `source` epoch by epoch, without end.

    Instead of something that can be iterated, `source` may be a function that makes it, for each
    epoch anew. Each rank goes through its own: nothing is divided here (see `undivided`). There is
    one position: a second iterator goes on where the one before has stopped.

    While iterating, an epoch without a batch, or with fewer than the position says, is a DataError.
    """

    def __init__(self, source: Iterable[T] | Callable[[], Iterable[T]]) -> None:
        self._make: Callable[[], Iterable[T]]
        if hasattr(source, "__iter__"):
            self._make = lambda: source
        elif callable(source):
            self._make = source
        else:
            raise DataError(
                f"the data: a {type(source).__name__} cannot be iterated; give a list, a "
                "DataLoader, an object with __iter__, or a function that returns one of them"
            )
        self._source: Any = source
        self._keeps_state = all(hasattr(source, f"{do}state_dict") for do in ("", "load_"))
        self._epoch = self._given = 0  # whole epochs, and the batches of the one that runs
        self._seed: int | None = None
        self._began: dict[str, torch.Tensor] = {}  # the source's generators when the epoch began
        self._inner: Iterator[T] | None = None
        self._ahead: list[T] = []  # taken from the source, but not given yet
        # The state while the source is elsewhere: it does not have it yet, or is a batch ahead.
        self._state: dict[str, Any] | None = None
        self._used = False

    @property
    def epoch(self) -> int:
        """The number of whole epochs given.

        Without a length of the source, an epoch is over when the batch after it is asked for.
        """
        return self._epoch

    @property
    def steps_per_epoch(self) -> int | None:
        """The batches of an epoch; None if the source does not say."""
        try:
            return len(self._source)
        except TypeError:
            return None

    def state_dict(self) -> dict[str, Any]:
        """Return the position: whole numbers, tensors of generators, and the source's own state."""
        if self._state is not None:
            return dict(self._state)
        own = self._keeps_state and self._used  # unused it might draw random numbers, to begin
        state: dict[str, Any] = {
            "epoch": self._epoch,
            "batches": self._given,
            "seed": self._seed,
            "generators": dict(self._began) if self._given and not own else _states(self._source),
        }
        return state | ({"source": self._source.state_dict()} if own else {})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next batch be the one after `state`.

        A DataError is raised for anything else, and if what has been used cannot begin anew.
        """
        epoch, given = state.get("epoch"), state.get("batches")
        if not (isinstance(epoch, int) and isinstance(given, int) and min(epoch, given) >= 0):
            raise DataError(f"the data: not the position of batches: {dict(state)!r}")
        if self._used and (isinstance(self._source, Iterator) or _lives_on(self._source)):
            raise DataError(
                f"the data: a {type(self._source).__name__} that was used in this process "
                "cannot be put back; make a new one"
            )
        self._state, self._seed = dict(state), state.get("seed")
        self._epoch, self._given = epoch, given
        self.close()

    def close(self) -> None:
        """Let go of the source's iterator, which ends its worker processes."""
        self._inner, self._ahead = None, []

    def __iter__(self) -> Iterator[T]:
        while True:
            if self._inner is None:
                self._inner = self._begin()
            batch = self._next(self._inner)
            if batch is _END:
                self._end()
                continue
            self._given += 1
            if self._given == self.steps_per_epoch:
                self._look_ahead(self._inner)
            yield batch

    def _begin(self) -> Iterator[T]:
        """Begin an epoch with its first batch, or come to the position in it."""
        state, self._state = self._state or {}, None
        if self._seed is None:
            self._seed = torch.initial_seed()
        seed = xxhash.xxh64_intdigest(f"{self._seed} {self._epoch}".encode()) >> 1
        own = self._keeps_state and "source" in state
        for part in _parts(self._source).values():
            if hasattr(part, "set_epoch"):
                part.set_epoch(self._epoch)
        with seeded_generators(seed):
            if own:
                self._source.load_state_dict(state["source"])
            # Only the first iterator of living workers draws their seed from the generator of the
            # order; in the undisturbed run that was in an epoch before. And one that is put back to
            # the end of an epoch may draw for it once more.
            if own or (state and self._epoch and _lives_on(self._source)):
                inner = iter(self._make())
        _restore(self._source, state.get("generators", {}))
        self._began, self._used = _states(self._source), True
        if own and self._given:
            return inner
        with seeded_generators(seed):
            inner = iter(self._make())
            if self._given:
                self._skip(inner)
                return inner
            first = next(inner, _END)  # a sampler may draw the order only now
            if first is _END and own:  # that was the rest of the epoch before
                inner = iter(self._make())
                first = next(inner, _END)
            self._ahead = [first]
        return inner

    def _skip(self, inner: Iterator[T]) -> None:
        """Throw away the batches that were used."""
        began, again = time.monotonic(), isinstance(self._source, Sequence)
        if not again:
            log.warning(
                "the data: a %s has no state_dict, so the %d batches of epoch %d that were used "
                "are read again. The next ones are those of the undisturbed run if the order comes "
                "from generators of torch, NumPy or Python that are seeded. torchdata's "
                "StatefulDataLoader does not read again",
                *(type(self._source).__name__, self._given, self._epoch),
            )
        for number in range(self._given):
            if next(inner, _END) is _END:
                raise DataError(
                    f"the data had {self._given} batches of epoch {self._epoch} or more, and "
                    f"has {number} now: give what the run has begun with"
                )
        if not again:
            log.info("the data: read again in %.1f s", time.monotonic() - began)

    def _next(self, inner: Iterator[T]) -> T:
        if not self._ahead:
            return next(inner, _END)
        self._state = None
        return self._ahead.pop()

    def _look_ahead(self, inner: Iterator[T]) -> None:
        """Let the epoch be over with the batch that is the last by the source's length."""
        state = self.state_dict()
        following = next(inner, _END)
        if following is _END:
            self._end()
        else:  # the length was wrong
            self._ahead, self._state = [following], state

    def _end(self) -> None:
        """End an epoch."""
        if not self._given and isinstance(self._source, Iterator) and self._epoch:
            raise DataError(
                f"the data: a {type(self._source).__name__} gives its batches only once, and "
                f"epoch {self._epoch} needs them again. Give a list, a DataLoader, an object whose "
                "__iter__ begins anew, or the function that makes the generator, without calling it"
            )
        if not self._given:
            raise DataError(
                f"the data has no batch in epoch {self._epoch}: it is empty, or smaller than "
                "one batch with drop_last"
            )
        self._epoch, self._given = self._epoch + 1, 0
        self.close()


def undivided(batch: Any, gather: Callable[[str], Sequence[str]]) -> str:
    """Return a warning if ranks have the same first batch, as if nobody divided the data; else "".

    All ranks call it with their own batch. `gather` returns the texts of all ranks, by rank.
    """
    digest, seen = xxhash.xxh3_128(), False
    for content in _contents(batch):
        digest.update(content)
        seen = True
    found = gather(digest.hexdigest() if seen else "")
    same = [rank for rank, each in enumerate(found) if each and found.count(each) > 1]
    if not same:
        return ""
    return (
        f"the first batch is the same on ranks {few(same, 8)}: the data seems not to be divided, "
        "so that they all compute the same. Give a DataLoader torch's DistributedSampler, take "
        "batches[rank::world_size] of a list, or use session.data"
    )


def _contents(batch: Any) -> Iterator[bytes]:
    """Yield the bytes of what a batch holds in tensors, arrays, texts and numbers."""
    if isinstance(batch, Mapping):
        batch = list(batch.values())
    if isinstance(batch, list | tuple):
        for part in batch:
            yield from _contents(part)
    elif isinstance(batch, torch.Tensor) and batch.layout == torch.strided:
        yield batch.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    elif isinstance(batch, np.ndarray) and not batch.dtype.hasobject:
        yield batch.tobytes()
    elif isinstance(batch, str | bytes | int | float):
        yield repr(batch).encode()


def _parts(source: Any) -> dict[str, Any]:
    """Return what decides the order of a source, as a DataLoader names it."""
    found = {"": source}
    for name in ("sampler", "batch_sampler", "batch_sampler.sampler", "dataset"):
        outer, _, inner = name.rpartition(".")
        found[name] = getattr(found[outer], inner, None)
    return found


def _states(source: Any) -> dict[str, torch.Tensor]:
    """Return the states of the generators of torch that a source and its parts have."""
    made = {name: getattr(part, "generator", None) for name, part in _parts(source).items()}
    return {name: one.get_state() for name, one in made.items() if isinstance(one, torch.Generator)}


def _restore(source: Any, states: Mapping[str, torch.Tensor]) -> None:
    parts = _parts(source)
    for name, state in states.items():
        one = getattr(parts.get(name), "generator", None)
        if isinstance(one, torch.Generator):
            one.set_state(state)


def _lives_on(source: Any) -> bool:
    """Return whether the source's worker processes live from epoch to epoch."""
    return bool(getattr(source, "persistent_workers", False) and source.num_workers)
