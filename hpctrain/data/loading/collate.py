"""The making of batches from the rows of several steps, and the buffers that they lie in.

A fixed-size field becomes (b, *shape). A variable-length field becomes, by choice,

    pad    FIELD (b, longest, *shape), filled up with zeros, and FIELD_length int64 (b,)
    pack   FIELD (total, *shape), the samples end to end, and FIELD_offsets int64 (b + 1,):
           sample i is FIELD[offsets[i]:offsets[i + 1]], as packed attention needs it

"mask" is bool (b,): False for a repeated sample that only fills up the tail.
"""

import weakref
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from hpctrain.base.errors import DataError
from hpctrain.data.shards.field import Field
from hpctrain.data.shards.ragged import Ragged
from hpctrain.data.shards.types import Array, Batch

IDLE = 8  # free buffers of one size that are kept
PAGE = 2**12  # bytes


class Buffers:
    """Lends arrays, whose memory it uses again; with `pin`, page-locked memory for CUDA.

    New memory costs a page fault for every 4 KB, as much time as the copy into it; page-locked
    memory costs far more. So a buffer is lent as an array, and comes back when its last view is
    gone, torch's views included. While a consumer keeps its batches, new buffers are made.

    Batches of variable length have any size. So buffers are a little larger than what is asked for:
    there are four sizes from one power of two to the next, and of page-locked memory one, because
    torch rounds it up to a power of two. Few free ones are kept: IDLE of a size, and in all no more
    than twice what was lent at a time.
    """

    def __init__(self, pin: bool = False) -> None:
        self.pin = pin and torch.cuda.is_available()
        self._idle: defaultdict[int, list[Array]] = defaultdict(list)
        self._lent: dict[int, tuple[weakref.ref[Any], int]] = {}
        self._most = 0  # bytes that were lent at a time

    def take(self, shape: tuple[int, ...], dtype: str) -> Array:
        """Return an array with any content; the loan ends when its last view is gone."""
        kind = np.dtype(dtype)
        needed = kind.itemsize * prod(shape)
        if needed < PAGE and not (self.pin and needed):  # malloc is faster than a loan
            return np.empty(shape, kind)
        step = max(PAGE, 1 << (needed - 1).bit_length() >> (0 if self.pin else 3))
        size = -(-needed // step) * step
        idle = self._idle[size]
        try:
            memory = idle.pop()
        except IndexError:
            self._make_room(size)
            memory = np.empty(size, np.uint8)
            if self.pin:
                memory = torch.empty(size, dtype=torch.uint8, pin_memory=True).numpy()
        array = np.frombuffer(memory.data[:needed], kind)
        # All views of this array, torch's too, refer to its base, a memoryview that nothing else
        # refers to. So the loan ends when the memoryview does.
        most = IDLE  # the end of Python takes the globals of modules before a script's last batch

        def end(reference: "weakref.ref[Any]") -> None:
            del self._lent[id(reference)]
            if len(idle) < most:
                idle.append(memory)

        reference = weakref.ref(array.base, end)
        self._lent[id(reference)] = reference, size
        return array.reshape(shape)

    def _make_room(self, size: int) -> None:
        """Let go of the free buffers beyond the limit; other threads take and return some."""
        lent = size + sum(each for _, each in [*self._lent.values()])
        self._most = max(self._most, lent)
        if lent + sum(size * len(idle) for size, idle in [*self._idle.items()]) > 2 * self._most:
            for idle in [*self._idle.values()]:
                idle.clear()


Layout = Literal["pad", "pack"]

MASK = "mask"
LENGTH, OFFSETS = "_length", "_offsets"
# torch stores these dtypes, but computes little with them.
WIDER = {np.dtype("uint16"): "int32", np.dtype("uint32"): "int64"}


class Collate:
    """Makes batches."""

    def __init__(self, fields: Mapping[str, Field], layout: Layout, buffers: Buffers) -> None:
        self._packs, self.buffers = layout == "pack", buffers
        more = OFFSETS if self._packs else LENGTH
        needed = {name + more for name, field in fields.items() if field.variable}
        taken = sorted(set(fields) & (needed | {MASK}))
        if taken:
            raise DataError(
                f"the loader needs the name {taken[0]!r} itself; `python -m data_prep repack OLD "
                f"NEW --rename {taken[0]}=NAME` renames that field"
            )

    def __call__(self, rows: Mapping[str, Array | Ragged], mask: NDArray[np.bool_]) -> deque[Batch]:
        """Return one batch of b samples for each step; the mask is bool (steps, b)."""
        # Few of torch's operations: each releases the GIL, and has to wait to get it back.
        steps, size = mask.shape
        columns: dict[str, Sequence[torch.Tensor]] = {MASK: self._tensor(mask).unbind()}
        for name, value in rows.items():
            if name == MASK:  # from a transform: __init__ has checked the data set's
                raise DataError(f"a transform returned {MASK!r}, which the loader adds itself")
            if len(value) != steps * size:
                raise DataError(f"{name}: {len(value)} rows for {steps} batches of {size}")
            if not isinstance(value, Ragged):
                tensor = self._tensor(value)
                columns[name] = (tensor,) if steps == 1 else tensor.split(size)
                continue
            columns |= self._ragged(name, value, steps, size)
        batches = zip(*columns.values(), strict=True)
        return deque(dict(zip(columns, batch, strict=True)) for batch in batches)

    def _ragged(
        self, name: str, value: Ragged, steps: int, size: int
    ) -> dict[str, Sequence[torch.Tensor]]:
        """Return what batches have of a variable-length field."""
        parts = [value.rows(i * size, (i + 1) * size) for i in range(steps)]
        if self._packs:
            values = [self._tensor(part.values) for part in parts]
            return {name: values, name + OFFSETS: [self._tensor(part.offsets) for part in parts]}
        lengths = self._tensor(value.lengths.reshape(steps, size)).unbind()
        return {name: [self._tensor(part.pad()) for part in parts], name + LENGTH: lengths}

    def _tensor(self, array: Array) -> torch.Tensor:
        """Return a tensor with the dtype, and in the memory, that the consumer gets."""
        tensor = torch.from_numpy(array)
        if array.dtype in WIDER:
            wide = self.buffers.take(array.shape, WIDER[array.dtype])
            tensor = torch.from_numpy(wide).copy_(tensor)
        return tensor.pin_memory() if self.buffers.pin and not tensor.is_pinned() else tensor
