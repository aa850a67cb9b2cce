"""The datasets of open shards: where their elements lie, and how they are read together.

Every read is a *span*: `length` elements of a dataset, beginning at element `start`. A sample of a
fixed-size field is a span of 1, its place in a variable-length field is a span of 2 of the offsets,
and a window of tokens is a span of the values. The spans of a batch, from any shards, are read by
one gather (see `_Arena`), except those of datasets that cannot be mapped.
"""

import ctypes
import mmap
import os
import weakref
from collections.abc import Iterator, Mapping, Sequence
from math import gcd, prod
from typing import TYPE_CHECKING

import numpy as np

from hpctrain.base.errors import DataError
from hpctrain.data.shards.field import Field
from hpctrain.data.shards.index import Shard
from hpctrain.data.shards.storage.file import Stamp
from hpctrain.data.shards.storage.layout import ShardLayout
from hpctrain.data.shards.types import Array, Int64s

if TYPE_CHECKING:
    import torch

    from hpctrain.data.shards.storage.chunks import Chunked
    from hpctrain.data.shards.storage.plain import Plain

# The dtype of a word by its bytes. torch copies large rows of single bytes about 10 % slower.
WORDS = {1: np.uint8, 2: np.int16, 4: np.int32, 8: np.int64}

# Far below the number of mappings that Linux allows (vm.max_map_count, 65,530), and within the
# 47 bits of an address.
MAX_SLOTS = 16_384
MAX_BYTES = 2**45

_HUGE_PAGE = 2**21  # bytes
_NONE, _NORESERVE, _FIXED = 0, 0x4000, 0x10
_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int),
    *(ctypes.c_int, ctypes.c_int, ctypes.c_int64),
)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class _Arena:
    """A reserved range of addresses, divided into slots that each hold one mapped file.

    reserved, nothing mapped:     ┌── slot 0 ──┬── slot 1 ──┬── slot 2 ──┬── … ──┐
    mapped, read-only:            │ train-0.h5 │ train-7.h5 │            │       │

    A row of a file is then a number of bytes at an address, whichever file it is in. The rows of a
    batch, from any files, are one `torch.index_select` on a tensor whose rows overlap: row `a` is
    the n bytes that begin at address `a`. The copy does not hold the GIL. Reserving addresses uses
    no memory, and a mapping keeps no file descriptor open.

    If a file shrinks while it is mapped, SIGBUS ends the process, as with any memory map.

    `slots` is how many files can be mapped at the same time: all of them, where possible.
    """

    def __init__(self, files: int, largest: int) -> None:
        # Aligned, so that the kernel can map huge pages where it caches a file in them.
        self.slot_bytes = -(-largest // _HUGE_PAGE) * _HUGE_PAGE
        self.slots = max(1, min(files, MAX_SLOTS, MAX_BYTES // self.slot_bytes))
        self._base = 0
        while not self._base:
            self.bytes = self.slots * self.slot_bytes
            reserved = self.bytes + _HUGE_PAGE
            try:
                start = _map(None, reserved, _NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
                self._base = -(-start // _HUGE_PAGE) * _HUGE_PAGE
            except OSError:  # a limit on addresses: `ulimit -v`
                if self.slots == 1:
                    raise
                self.slots = max(1, self.slots // 4)
        self._views: dict[tuple[int, int], torch.Tensor] = {}  # by length and word size
        weakref.finalize(self, _libc.munmap, start, reserved)

    def map(self, slot: int, descriptor: int, size: int) -> None:
        """Map the `size` bytes of an open file into `slot`, in which nothing is."""
        start = self._base + slot * self.slot_bytes
        _map(start, size, mmap.PROT_READ, mmap.MAP_SHARED | _FIXED, descriptor)

    def will_need(self, address: int, size: int) -> None:
        """Let the kernel read `size` bytes from `address` in the background."""
        start = address // mmap.PAGESIZE * mmap.PAGESIZE
        _libc.madvise(self._base + start, address + size - start, mmap.MADV_WILLNEED)

    def gather(self, addresses: Int64s, word: int, out: Array) -> None:
        """Fill `out`, contiguous, with n rows of bytes, which begin at the n `addresses`.

        All rows lie in mapped files. The addresses and the size of a row are multiples of `word`
        bytes, one of WORDS.
        """
        import torch  # data_prep reads without it, and without mapping

        places = torch.from_numpy(addresses // word if word > 1 else addresses)
        count = places.shape[0]
        # A batch is copied in half a millisecond, so only two Python calls are made here.
        rows = torch.from_numpy(np.ndarray((count, out.nbytes // (count * word)), WORDS[word], out))
        torch.index_select(self._rows(rows.shape[1], word), 0, places, out=rows)

    def _rows(self, size: int, word: int) -> "torch.Tensor":
        """Return a view (many, size) whose row `a` is the `size` words that begin at word `a`."""
        view = self._views.get((size, word))
        if view is None:
            import torch

            memory = (ctypes.c_uint8 * self.bytes).from_address(self._base)
            words = torch.frombuffer(memory, dtype=torch.from_numpy(np.empty(0, WORDS[word])).dtype)
            view = words.as_strided((len(words) - size + 1, size), (1, 1))
            if len(self._views) < 64:  # padded rows may have any length
                self._views[size, word] = view
        return view


def _map(start: int | None, size: int, protection: int, flags: int, descriptor: int = -1) -> int:
    address = _libc.mmap(start, size, protection, flags | _NORESERVE, descriptor, 0)
    if address is None or address == _FAILED:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return int(address)


SHORT = 16  # elements; shorter spans of an unmapped dataset are read row by row, in one call


class Datasets:
    """FIELD, or FIELD/offsets and FIELD/values, of each open shard.

    A shard is known by its number, and is open (in `layouts`) if it is asked for. At most `slots`
    shards are added. `users` counts who reads from them.
    """

    def __init__(self, shards: Sequence[Shard], fields: Mapping[str, Field]) -> None:
        files, self._types = len(shards), dict(_elements(fields))
        self._sizes = {
            name: np.dtype(dtype).itemsize * prod(shape)
            for name, (dtype, shape) in self._types.items()
        }
        # By dataset and shard: the address of element 0 (-1: not mapped), the number of elements.
        self._bases = {name: np.full(files, -1, np.int64) for name in self._types}
        self._totals = {name: np.zeros(files, np.int64) for name in self._types}
        # Word size per dataset: it divides the size and the address of every mapped element.
        self._words = {name: gcd(size, max(WORDS)) or 1 for name, size in self._sizes.items()}
        self._arena = _Arena(files, max(shard.bytes for shard in shards))
        self.slots = self._arena.slots
        self.layouts: dict[int, ShardLayout] = {}
        self.is_open = np.zeros(files, np.bool_)
        self.users = 0
        self.all_mapped = True  # among the shards opened so far

    def add(self, shard: int, layout: ShardLayout) -> None:
        """Map what can be mapped of a shard that has just been opened."""
        if layout.rows:
            self.all_mapped = False
        if layout.offsets:
            slot = len(self.layouts)
            self._map(layout, slot)
            for name, offset in layout.offsets.items():
                self._words[name] = gcd(self._words[name], offset)
                self._bases[name][shard] = slot * self._arena.slot_bytes + offset
        for name, total in layout.totals.items():
            self._totals[name][shard] = total
        self.layouts[shard] = layout
        self.is_open[shard] = True

    def chunk_rows(self, shard: int) -> int:
        """Return how many samples a shard stores, and reads, together."""
        return max((rows.chunk_rows for rows in self.layouts[shard].rows.values()), default=1)

    def totals(self, name: str, shards: Int64s) -> Int64s:
        """Return the number of elements of a dataset in each of `shards`, int64 (n,)."""
        found: Int64s = self._totals[name][shards]
        return found

    def spans(self, name: str, shards: Int64s, starts: Int64s, length: int, out: Array) -> None:
        """Read n spans of the same length, from n `shards` at n `starts`, into `out`.

        Each span ends within the dataset. `out` is contiguous, of any dtype and shape, and is
        filled with the bytes.
        """
        if not out.nbytes:
            return
        if self.all_mapped:
            self._gather(name, shards, starts, out)
        else:
            self._mixed_spans(name, shards, starts, length, out)

    def _mixed_spans(
        self, name: str, shards: Int64s, starts: Int64s, length: int, out: Array
    ) -> None:
        """Read spans as `spans` does where not all can be gathered."""
        dtype, shape = self._types[name]
        rows = out.reshape(-1).view(dtype).reshape(len(starts), length, *shape)
        mapped = self._bases[name][shards] >= 0
        if mapped.any():
            found = np.empty((int(mapped.sum()), *rows.shape[1:]), dtype)
            self._gather(name, shards[mapped], starts[mapped], found)
            rows[mapped] = found
        for shard in np.unique(shards[~mapped]).tolist():
            here = np.flatnonzero(shards == shard)
            stored = self.layouts[shard].rows[name]
            if len(here) == len(rows):
                _read(stored, starts, length, rows)
                return
            spans = np.empty((len(here), *rows.shape[1:]), dtype)
            _read(stored, starts[here], length, spans)
            rows[here] = spans

    def runs(self, name: str, shards: Int64s, starts: Int64s, ends: Int64s, out: Array) -> None:
        """Read spans of FIELD/values of different lengths, end to end, into `out` (total, *shape).

        `ends`, int64 (n,), says where each span ends in it.
        """
        lengths = np.diff(ends, prepend=0)
        longest = int(lengths.max(initial=0))
        padded = len(starts) * longest
        fits = starts + longest <= self._totals[name][shards]
        if fits.all() and padded <= 4 * len(out) and (self._bases[name][shards] >= 0).all():
            spans = np.empty((len(starts), longest, *out.shape[1:]), out.dtype)
            self.spans(name, shards, starts, longest, spans)
            out[:] = spans[np.arange(longest) < lengths[:, None]]
            return
        for i in range(len(starts)):  # few and long, or not mapped
            run = out[ends[i] - lengths[i] : ends[i]]
            if len(run):
                self.spans(name, shards[i : i + 1], starts[i : i + 1], len(run), run)

    def will_need(self, name: str, shard: int, start: int, stop: int) -> None:
        """Start to read the elements from `start` to `stop` of a dataset."""
        base, size = int(self._bases[name][shard]), self._sizes[name]
        if base >= 0:
            self._arena.will_need(base + start * size, (stop - start) * size)
        else:
            self.layouts[shard].rows[name].prefetch(np.arange(start, stop))

    def _gather(self, name: str, shards: Int64s, starts: Int64s, out: Array) -> None:
        addresses: Int64s = starts * self._sizes[name]
        addresses += self._bases[name][shards]
        self._arena.gather(addresses, self._words[name], out)

    def _map(self, layout: ShardLayout, slot: int) -> None:
        """Map the file of a shard into a slot; it must still be the file that was opened."""
        try:
            descriptor = os.open(layout.path, os.O_RDONLY)
            try:
                stamp = Stamp.of(os.fstat(descriptor))
                self._arena.map(slot, descriptor, layout.size)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise DataError(f"shard {layout.path} cannot be mapped: {error.strerror}") from None
        layout.check_is(stamp)


def _elements(fields: Mapping[str, Field]) -> Iterator[tuple[str, tuple[str, tuple[int, ...]]]]:
    """Yield the datasets of the fields, with dtype and shape of one element."""
    for name, field in fields.items():
        if field.variable:
            yield f"{name}/offsets", ("int64", ())
            yield f"{name}/values", (field.dtype, field.shape)
        else:
            yield name, (field.dtype, field.shape)


def _read(dataset: "Chunked | Plain", starts: Int64s, length: int, out: Array) -> None:
    """Fill `out`, (n, length, *shape)."""
    first, count = int(starts[0]), len(starts) * length
    if (np.diff(starts) == length).all():  # one after the other
        dataset.copy(first, first + count, out.reshape(count, *out.shape[2:]))
    elif length <= SHORT:
        out[:] = dataset.rows((starts[:, None] + np.arange(length)).reshape(-1)).reshape(out.shape)
    else:
        for row, start in enumerate(starts.tolist()):
            dataset.copy(start, start + length, out[row])
