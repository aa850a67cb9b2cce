"""Which transforms are random: an evaluation leaves them out, or asks what to use in their place.

transform ─┬─ an attribute `random`, True or False ── says it
           └─ tried on the first samples, up to 32 times each
              ├─ it draws nothing, and has no generator of its own ── the evaluation uses it
              ├─ some draws leave each sample as it is ── it only augments: left out
              └─ it also converts, or cannot leave a sample as it is ── the key val_… is needed

Random is what draws from the generator that it is given, from one of its own, or from the global
ones of Python, numpy or torch, and what gives two results for a sample. A transform that first
draws later, for a sample that was not tried, ends the evaluation with an error (`Watched`).
"""

import dis
import functools
import inspect
import itertools
import sysconfig
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal

import numpy as np
import torch

from hpctrain.data.draws import Draws
from hpctrain.data.workers.samples import SampleRandom, has_drawn
from hpctrain.generators import KINDS, same_generators, states
from hpctrain.shards.types import Batch

Verdict = Literal["fixed", "augments", "unclear"]

SAMPLES = 4  # samples that are tried, and batches
ROWS = 2  # samples of such a batch; with more, one that is left as it is would be rare
_FEW, _MANY = 4, 32  # calls for each: to find whether it is random, and whether one changes nothing
_DEPTH, _MOST = 5, 1000  # of what is looked into: levels, and elements of a list
_RANDOM_MODULES = ("random", "numpy.random", "secrets")
_OF_TORCH = ("rand", "bernoulli", "multinomial", "normal", "poisson")
_LIBRARIES = tuple(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))

# One result: dtype, shape and bytes of each field.
_Result = Mapping[str, tuple[str, tuple[int, ...], bytes]]


def marked(transform: Any) -> bool | None:
    """Return what the attribute `random`, if it is a bool, of a transform or its function says."""
    while isinstance(transform, functools.partial) and "random" not in vars(transform):
        transform = transform.func
    value = getattr(transform, "random", None)
    return value if isinstance(value, bool) else None


def of_samples(transform: Any, samples: Sequence[Mapping[str, Any]]) -> Verdict:
    """Judge a transform of single samples, by some samples."""
    stream = SampleRandom()

    def call(number: int, trial: int) -> tuple[bool, _Result]:
        given = {name: np.array(value)[()] for name, value in samples[number].items()}
        generator = stream.at(trial, 0, number)
        result = transform(given, generator)
        return has_drawn(generator), _arrays(result)

    return _judge(transform, call, [_arrays(sample) for sample in samples])


def of_batches(transform: Any, batches: Sequence[Batch]) -> Verdict:
    """Judge a transform of whole batches, by some batches on one device."""

    def call(number: int, trial: int) -> tuple[bool, _Result]:
        given = {name: value.clone() for name, value in batches[number].items()}
        draws = Draws(trial, 0, np.arange(len(next(iter(given.values())))))
        result = transform(given, draws)
        return draws.drawn > 0, _tensors(result)

    return _judge(transform, call, [_tensors(batch) for batch in batches])


def _judge(
    transform: Any,
    call: Callable[[int, int], tuple[bool, _Result]],
    unchanged: Sequence[_Result],
) -> Verdict:
    with same_generators():
        before = states()
        tried = [[call(number, trial) for trial in range(_FEW)] for number in range(len(unchanged))]
        drawn = any(drew for each in tried for drew, _ in each)
        differs = any(result != each[0][1] for each in tried for _, result in each)
        moved = any(not torch.equal(before[name], each) for name, each in states().items())
        if not (drawn or differs or moved):
            return "unclear" if _may_draw(transform, set()) else "fixed"
        for number, original in enumerate(unchanged):
            more = (call(number, trial) for trial in range(_FEW, _MANY))
            if all(result != original for _, result in itertools.chain(tried[number], more)):
                return "unclear"
    return "augments"


def _arrays(sample: Any) -> _Result:
    if not isinstance(sample, Mapping):  # the evaluation says what is wrong with it
        return {}
    arrays = {name: np.asarray(value) for name, value in sample.items()}
    return {name: (str(a.dtype), a.shape, a.tobytes()) for name, a in arrays.items()}


def _tensors(batch: Any) -> _Result:
    if not isinstance(batch, Mapping):
        return {}
    found = {}
    for name, value in batch.items():
        flat = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        found[name] = str(value.dtype), tuple(value.shape), flat.numpy().tobytes()
    return found


def _may_draw(thing: Any, seen: set[int], depth: int = _DEPTH) -> bool:
    """Whether a generator, or a module of random numbers, is in reach: for some samples only."""
    if isinstance(thing, KINDS):
        return True
    if not depth or id(thing) in seen:
        return False
    seen.add(id(thing))
    if isinstance(thing, types.FunctionType):
        if thing.__code__.co_filename.startswith(_LIBRARIES):
            return False
        if any(_uses_random(code, thing.__globals__) for code in _codes(thing.__code__)):
            return True
    return any(_may_draw(part, seen, depth - 1) for part in _parts(thing))


def _parts(thing: Any) -> Iterator[Any]:
    """Yield what an object holds, and what the code of a function refers to."""
    if isinstance(thing, functools.partial):
        yield from (thing.func, *thing.args, *thing.keywords.values())
    elif isinstance(thing, types.MethodType):
        yield from (thing.__self__, thing.__func__)
    elif isinstance(thing, types.FunctionType):
        with suppress(ValueError):  # a variable of an outer function that has no value yet
            known = inspect.getclosurevars(thing)
            yield from (*known.nonlocals.values(), *known.globals.values())
        yield from (*(thing.__defaults__ or ()), *(thing.__kwdefaults__ or {}).values())
    elif isinstance(thing, list | tuple | set | frozenset):
        yield from itertools.islice(thing, _MOST)
    elif isinstance(thing, dict):
        yield from itertools.islice(thing.values(), _MOST)
    elif isinstance(thing, types.BuiltinFunctionType):
        yield thing.__self__  # `from random import random` is a method of a generator
    elif not isinstance(thing, type | types.ModuleType):
        yield from getattr(thing, "__dict__", {}).values()
        for base in type(thing).__mro__:
            yield from (part for part in vars(base).values() if inspect.isfunction(part))


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yield the code of a function and of the functions inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


def _uses_random(code: types.CodeType, known: Mapping[str, Any]) -> bool:
    """Whether code refers to `random`, to `np.random` or to `torch.rand` and the like."""
    for step in dis.get_instructions(code):
        if step.opname == "IMPORT_NAME":
            module = step.argval
        elif step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            found = known.get(step.argval)
            module = found.__name__ if isinstance(found, types.ModuleType) else ""
            if str(step.argval).startswith(_OF_TORCH) and getattr(torch, step.argval, 0) is found:
                return True  # from torch import rand
        else:
            continue
        if module in _RANDOM_MODULES or (module == "numpy" and "random" in code.co_names):
            return True
        if module == "torch" and any(name.startswith(_OF_TORCH) for name in code.co_names):
            return True
    return False
