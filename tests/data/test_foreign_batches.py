"""Batches that a loop of one's own brings: they go on after any batch as if nothing had been."""

import logging
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, RandomSampler
from torch.utils.data.distributed import DistributedSampler

from hpctrain.data.foreign import ForeignBatches, undivided
from hpctrain.data.generators import restore, states
from hpctrain.errors import DataError

SAMPLES, SIZE = 10, 3  # 4 batches an epoch, of which the last is smaller


class Noisy(Dataset[torch.Tensor]):
    """Samples with random numbers, drawn in the process that reads them."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index, torch.rand(()).item()])


class Plain(Noisy):
    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index])


class Stateful:
    """Batches that say where they are, as torchdata's StatefulDataLoader does."""

    def __init__(self) -> None:
        self.next, self.read, self.ended = 0, 0, False

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Iterator[int]:
        self.next, self.ended = 0 if self.ended else self.next, False
        while self.next < SAMPLES:
            self.next, self.read = self.next + 1, self.read + 1
            yield self.next - 1
        self.ended = True

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next = state["next"]


def loader(data: Dataset[torch.Tensor], workers: int = 0, **more: Any) -> Callable[[], Any]:
    return lambda: DataLoader(data, SIZE, num_workers=workers, **more)


def own_generator(**more: Any) -> Any:
    generator = torch.Generator().manual_seed(3)
    return DataLoader(Plain(), SIZE, shuffle=True, generator=generator, **more)


def own_sampler() -> Any:
    sampler = RandomSampler(Plain(), generator=torch.Generator().manual_seed(4))
    return DataLoader(Plain(), SIZE, sampler=sampler)


def two_ranks() -> Any:
    return DataLoader(Plain(), SIZE, sampler=DistributedSampler(Plain(), 2, 0))


def drawing() -> Iterator[int]:
    """Draw an order for the epoch, and numbers between those of the training."""
    for index in np.random.permutation(SAMPLES):  # noqa: NPY002
        yield int(index) + int(torch.randint(1000, ()))


KINDS: dict[str, Callable[[], Any]] = {
    "list": lambda: [1, 2, 3],
    "function": lambda: drawing,
    "stateful": Stateful,
    "global": loader(Noisy(), shuffle=True),
    "workers": loader(Noisy(), 2, shuffle=True),
    "generator": own_generator,
    "living workers": lambda: own_generator(num_workers=1, persistent_workers=True),
    "sampler": own_sampler,
    "two ranks": two_ranks,
}


def trained(batches: ForeignBatches[Any], steps: int) -> list[Any]:
    """Return what a training with random numbers of its own makes of the batches."""
    some = islice(batches, steps)
    return [(torch.as_tensor(batch).tolist(), torch.rand(()).item()) for batch in some]


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_run_is_the_undisturbed_one(kind: str) -> None:
    torch.manual_seed(0)
    whole = trained(ForeignBatches(KINDS[kind]()), 11)
    for stop in (0, 2, 4, 5, 10):  # in an epoch, and at the end of one
        torch.manual_seed(0)
        first = ForeignBatches(KINDS[kind]())
        begun = trained(first, stop)
        state, random = first.state_dict(), states()
        first.close()

        torch.manual_seed(999)
        resumed = ForeignBatches(KINDS[kind]())
        resumed.load_state_dict(state)
        assert resumed.state_dict() == state
        restore(random)
        assert begun + trained(resumed, 11 - stop) == whole, stop
        resumed.close()


@pytest.mark.parametrize("kind", ["global", "generator", "sampler", "two ranks", "function"])
def test_each_epoch_has_an_order_of_its_own(kind: str) -> None:
    batches = ForeignBatches(KINDS[kind]())
    half = batches.steps_per_epoch or SAMPLES
    made = [batch for batch, _ in trained(batches, 2 * half + 1)]
    assert made[:half] != made[half : 2 * half]
    assert batches.epoch == 2


def test_an_epoch_is_over_with_its_last_batch() -> None:
    batches = ForeignBatches([1, 2, 3])
    assert [(batch, batches.epoch) for batch in islice(batches, 4)] == [
        (1, 0), (2, 0), (3, 1), (1, 1),
    ]  # fmt: skip
    assert batches.steps_per_epoch == 3
    assert ForeignBatches(drawing).steps_per_epoch is None


def test_a_wrong_length_loses_nothing() -> None:
    class Wrong(Stateful):
        def __len__(self) -> int:
            return 4

    batches = ForeignBatches(Wrong())
    assert list(islice(batches, 4)) == [0, 1, 2, 3]
    resumed = ForeignBatches(Wrong())
    resumed.load_state_dict(batches.state_dict())
    assert list(islice(resumed, 8)) == list(islice(batches, 8)) == [4, 5, 6, 7, 8, 9, 0, 1]


def test_what_keeps_its_state_is_not_read_again(caplog: pytest.LogCaptureFixture) -> None:
    first, source = ForeignBatches(Stateful()), Stateful()
    trained(first, 7)
    resumed = ForeignBatches(source)
    resumed.load_state_dict(first.state_dict())
    trained(resumed, 1)
    assert source.read == 1
    assert not caplog.records


def test_the_cost_of_reading_again_is_told(caplog: pytest.LogCaptureFixture) -> None:
    resumed = ForeignBatches(own_generator())
    resumed.load_state_dict({"epoch": 2, "batches": 3, "seed": 0})
    with caplog.at_level(logging.WARNING):
        trained(resumed, 1)
    assert "the data: a DataLoader has no state_dict, so the 3 batches of epoch 2" in caplog.text


def test_what_cannot_be_used_is_told() -> None:
    with pytest.raises(DataError, match="a int cannot be iterated; give a list, a DataLoader"):
        ForeignBatches(3)  # type: ignore[arg-type]
    with pytest.raises(DataError, match="the data has no batch in epoch 0"):
        next(iter(ForeignBatches([])))
    with pytest.raises(DataError, match="a generator gives its batches only once, and epoch 1"):
        trained(ForeignBatches(drawing()), SAMPLES + 1)
    used = ForeignBatches(drawing())
    trained(used, 2)
    with pytest.raises(DataError, match="a generator that was used in this process cannot be put"):
        used.load_state_dict(used.state_dict())
    with pytest.raises(DataError, match=r"not the position of batches: \{'consumed': 3\}"):
        used.load_state_dict({"consumed": 3})
    shorter = ForeignBatches([1, 2])
    shorter.load_state_dict({"epoch": 0, "batches": 3, "seed": 0})
    with pytest.raises(DataError, match="had 3 batches of epoch 0 or more, and has 2 now"):
        next(iter(shorter))


def test_ranks_with_the_same_batch_are_told() -> None:
    def texts(batches: list[Any]) -> list[str]:
        found: list[str] = []
        for batch in batches:
            undivided(batch, lambda text: [found.append(text) or text])  # type: ignore[func-returns-value]
        return found

    one, other = ({"x": torch.tensor([n], dtype=torch.bfloat16), "y": ["a"]} for n in (1, 2))
    assert undivided(one, lambda _: texts([one, other])) == ""
    said = undivided(one, lambda _: texts([one, other, one]))
    assert said.startswith("the first batch is the same on ranks 0, 2: the data seems not to be")
    assert undivided(object(), lambda _: texts([object(), object()])) == ""
