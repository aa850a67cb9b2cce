"""Maps files side by side into one reserved range of addresses, to read from all in one call.

    reserved, nothing mapped:     ┌── slot 0 ──┬── slot 1 ──┬── slot 2 ──┬── … ──┐
    mapped, read-only:            │ train-0.h5 │ train-7.h5 │            │       │

A row of a file is then a number of bytes at an address, whichever file it is in. The rows of a
batch, from any files, are one `torch.index_select` on a tensor whose rows overlap: row `a` is the n
bytes that begin at address `a`. The copy does not hold the GIL. Reserving addresses uses no memory,
and a mapping keeps no file descriptor open.

If a file shrinks while it is mapped, SIGBUS ends the process, as with any memory map.
"""

import ctypes
import mmap
import os
import weakref

import numpy as np
import torch

from hpctrain.data.shards.types import Array, Int64s

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


class Arena:
    """A reserved range of addresses, divided into slots that each hold one mapped file.

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
        memory = (ctypes.c_uint8 * self.bytes).from_address(self._base)
        self._memory = torch.frombuffer(memory, dtype=torch.uint8)
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
        places = torch.from_numpy(addresses // word if word > 1 else addresses)
        count = places.shape[0]
        # A batch is copied in half a millisecond, so only two Python calls are made here.
        rows = torch.from_numpy(np.ndarray((count, out.nbytes // (count * word)), WORDS[word], out))
        torch.index_select(self._rows(rows.shape[1], word), 0, places, out=rows)

    def _rows(self, size: int, word: int) -> torch.Tensor:
        """Return a view (many, size) whose row `a` is the `size` words that begin at word `a`."""
        view = self._views.get((size, word))
        if view is None:
            words = self._memory.view(torch.from_numpy(np.empty(0, WORDS[word])).dtype)
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
