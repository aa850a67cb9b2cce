"""Apply a Python transform of single samples to a batch.

    def transform(sample: dict[str, Any], random: numpy.random.Generator) -> dict[str, Any]:
        image = sample["image"][:, :, ::-1] if random.random() < 0.5 else sample["image"]
        return {"image": image.astype(np.float32) / 255, "label": sample["label"]}

A transform gets one sample: an array per field (a variable-length one with its own length), or a
numpy scalar for a field of shape (). It returns the same or other fields, of any dtype and shape,
but all samples of a batch must agree. It may write into the arrays.

The generator is a pure function of (seed, epoch, position). It is Philox, which has a separate,
independent stream for each key and counter (Salmon et al., "Parallel random numbers: as easy as 1,
2, 3", SC 2011). So a sample gets the same random numbers in every process, on every rank and after
every restart.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from hpctrain.base.errors import ConfigError, DataError
from hpctrain.data.shards.ragged import Ragged
from hpctrain.data.shards.types import Array, Int64s

Sample = dict[str, Any]
Transform = Callable[[Sample, np.random.Generator], Mapping[str, Any]]

_MASK = 2**64 - 1
_UNUSED = 4  # the place in Philox's buffer of four numbers, before the first draw


class SampleRandom:
    """One generator that is set to the stream of a sample. That takes 0.7 us, a new one 6 us."""

    def __init__(self) -> None:
        self._bits = np.random.Philox(0)
        self._state: Any = self._bits.state
        self.generator = np.random.Generator(self._bits)

    def at(self, seed: int, epoch: int, position: int) -> np.random.Generator:
        """Return the generator, at the start of a sample's stream."""
        inner = self._state["state"]
        inner["key"][:] = seed & _MASK, epoch
        inner["counter"][1] = position  # word 0 counts within the stream
        self._bits.state = self._state
        return self.generator


def has_drawn(generator: np.random.Generator) -> bool:
    """Return whether numbers were drawn since `SampleRandom.at` returned the generator."""
    bits: Any = generator.bit_generator
    state = bits.state
    moved = state["state"]["counter"][0] or state["has_uint32"] or state["buffer_pos"] != _UNUSED
    return bool(moved or bits.seed_seq.n_children_spawned)


class Watched:
    """A transform of an evaluation, at `key` of the config, which may not draw random numbers."""

    def __init__(self, transform: Callable[..., Any], key: str) -> None:
        self._transform, self._key = transform, key

    def __call__(self, sample: Any, random: Any) -> Any:
        """Return what the transform returns; a ConfigError if it has drawn random numbers."""
        result = self._transform(sample, random)
        self._check(has_drawn(random), "sample")
        return result

    def _check(self, drawn: bool, what: str) -> None:
        if drawn:
            why = f"draws random numbers in an evaluation, for this {what}"
            raise ConfigError(asked_for(self._key, why))

    def __repr__(self) -> str:
        return repr(self._transform)


def asked_for(key: str, why: str) -> str:
    """Return the message that an evaluation needs transforms of its own: at which key, and why."""
    name = key.partition(".")[2].partition("[")[0]
    return (
        f"{key} {why}. Say what an evaluation uses: data.val_{name}=[] for nothing, or a list as "
        f"in data.{name}; or give the function or class an attribute `random`: True leaves it out "
        "of evaluations, False says that it never draws"
    )


class OneByOne:
    """Applies transforms to a sample, one after the other."""

    def __init__(self, transforms: Sequence[Transform]) -> None:
        self.transforms = list(transforms)

    def __call__(self, sample: Sample, random: np.random.Generator) -> Sample:
        """Return the transformed sample; the module describes the interface."""
        for transform in self.transforms:
            result: Any = transform(sample, random)
            if not isinstance(result, Mapping):
                raise DataError(
                    f"the transform {transform} returned {type(result).__name__}; it must return "
                    "a dict of fields"
                )
            sample = dict(result)
        return sample


def apply(
    transform: Transform,
    rows: Mapping[str, Array | Ragged],
    key: tuple[int, int],
    positions: Int64s,
    indices: Int64s,
    random: SampleRandom,
) -> dict[str, Array]:
    """Transform a batch, sample by sample, and return its fields, (n, *shape) each.

    The key is (seed, epoch); positions in the epoch, and indices for messages, are int64 (n,). What
    the transform raises gets a note that names the sample.
    """
    seed, epoch = key
    out: dict[str, Array] = {}
    for i, position in enumerate(positions.tolist()):
        sample = {name: value[i] for name, value in rows.items()}
        try:
            result = transform(sample, random.at(seed, epoch, position))
            if not isinstance(result, Mapping):
                raise DataError(
                    f"the transform returned {type(result).__name__} for sample {indices[i]}; it "
                    "must return a dict of fields"
                )
            arrays = {name: np.asarray(value) for name, value in result.items()}
        except BaseException as error:
            error.add_note(
                f"in the transform of sample {indices[i]} (position {position} of epoch {epoch}), "
                f"whose fields are {_describe({k: v[i] for k, v in rows.items()})}"
            )
            raise
        if not out:
            _check_kinds(arrays, int(indices[i]))
            out = {name: np.empty((len(indices), *a.shape), a.dtype) for name, a in arrays.items()}
        if arrays.keys() != out.keys():
            raise DataError(
                f"the transform returned {_describe(arrays)} for sample {indices[i]}, and "
                f"{', '.join(out)} for sample {indices[0]}: the fields of a batch must be the same"
            )
        for name, array in arrays.items():
            target = out[name]
            if array.dtype != target.dtype or array.shape != target.shape[1:]:
                raise DataError(
                    f"the transform returned {name!r} as {_spec(array)} for sample {indices[i]} "
                    f"and as {_spec(target[0])} for sample {indices[0]}: in a batch dtype and "
                    "shape must be the same. Crop or pad to one shape; if that would change the "
                    "result of an evaluation, evaluate with load_run(RUN).model(), one by one"
                )
            target[i] = array
    return out


def _check_kinds(arrays: Mapping[str, Array], index: int) -> None:
    if not arrays:
        raise DataError(f"the transform returned no field for sample {index}")
    for name, array in arrays.items():
        if array.dtype.kind not in "biuf":
            raise DataError(
                f"the transform returned {name!r} as {_spec(array)} for sample {index}; it must "
                "return numbers or arrays of bool, integer or floating-point type"
            )


def _spec(array: Any) -> str:
    array = np.asarray(array)
    return f"{array.dtype}{list(array.shape)}" if array.shape else str(array.dtype)


def _describe(sample: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {_spec(value)}" for name, value in sample.items())
