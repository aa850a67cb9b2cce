"""The global generators of torch, of its GPU, of NumPy (`np.random`) and of Python (`random`).

A model or a task draws from any of them: models of transformers mask with those of NumPy. So they
are seeded, kept in checkpoints and left as they were together.
"""

import itertools
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch

KINDS: tuple[type[Any], ...] = (
    random.Random,
    np.random.Generator,
    np.random.RandomState,
    torch.Generator,
)
"""The classes of generators, of which a model or a task may have some of its own."""


def state_of(generator: Any) -> Any:
    """Return the state of a generator of one of the KINDS."""
    match generator:
        case np.random.Generator():
            return generator.bit_generator.state
        case random.Random():
            return generator.getstate()
    return generator.get_state()


def set_state(generator: Any, state: Any) -> None:
    """Give a generator of one of the KINDS the state that `state_of` has returned."""
    match generator:
        case np.random.Generator():
            generator.bit_generator.state = state
        case random.Random():
            generator.setstate(state)
        case _:
            generator.set_state(state)


def seed_generators(seed: int, of_torch: int | None = None) -> None:
    """Seed all of them; those of torch by `of_torch`, if it is given."""
    torch.manual_seed(seed if of_torch is None else of_torch)
    # With the same words NumPy would draw the numbers of Python.
    np.random.seed([seed % 2**32, seed // 2**32 % 2**32, 1])  # noqa: NPY002
    random.seed(seed)


@contextmanager
def seeded_generators(seed: int) -> Iterator[None]:
    """Seed all of them, and restore them at the end."""
    with same_generators():
        seed_generators(seed)
        yield


@contextmanager
def same_generators() -> Iterator[None]:
    """Restore all of them at the end."""
    with torch.random.fork_rng([torch.cuda.current_device()] if _uses_gpu() else []), _outside():
        yield


@contextmanager
def _outside(begin: Any = None) -> Iterator[None]:
    """Restore those of Python and NumPy at the end; `begin` are the states to begin with."""
    before = _states_outside()
    try:
        if begin:
            _set_outside(begin)
        yield
    finally:
        _set_outside(before)


def same_again(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function whose later calls draw what the first one draws from NumPy and Python."""
    began, calls = _states_outside(), itertools.count()

    def call(*args: Any, **kwargs: Any) -> Any:
        with _outside(began) if next(calls) else nullcontext():
            return function(*args, **kwargs)

    return call


def _states_outside() -> tuple[Any, Any]:
    return random.getstate(), np.random.get_state()  # noqa: NPY002


def _set_outside(found: tuple[Any, Any]) -> None:
    random.setstate(found[0])
    np.random.set_state(found[1])  # noqa: NPY002


def states() -> dict[str, torch.Tensor]:
    """Return the state of each by its name, as tensors on the CPU."""
    _, words, gauss = random.getstate()
    of_numpy: Any = np.random.get_state()  # noqa: NPY002
    numbers = {
        "python": [*words, gauss is not None, gauss or 0.0],
        "numpy": [*of_numpy[1].tolist(), *of_numpy[2:]],
    }
    # A double holds each word of 32 bits exactly.
    found = {name: torch.tensor(each, dtype=torch.float64) for name, each in numbers.items()}
    found["cpu"] = torch.get_rng_state()
    return found | ({"cuda": torch.cuda.get_rng_state()} if _uses_gpu() else {})


def restore(found: Mapping[str, torch.Tensor]) -> None:
    """Give the generators the states of their names; those that are not named go on."""
    for name, state in found.items():
        if name == "cpu":
            torch.set_rng_state(state)
        elif name == "cuda":
            torch.cuda.set_rng_state(state)
        else:
            *words, has_gauss, gauss = state.tolist()
            *key, place = map(int, words)
            if name == "python":
                random.setstate((3, (*key, place), gauss if has_gauss else None))
            else:
                given = "MT19937", np.array(key, np.uint32), place, int(has_gauss), gauss
                np.random.set_state(given)  # noqa: NPY002


def _uses_gpu() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_initialized()
