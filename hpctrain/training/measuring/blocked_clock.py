"""The time that the training's thread is blocked in the user's own code: a sleep, a file, a lock.

    every 50 ms   the frames of the thread ── in the user's code? ── no core in the next 2 ms?
                                              blocked since the look before ──┘

A thread that waits for other ranks has a frame of torch inside of the user's. A call of C that
holds Python's lock lets nobody look; then the look comes late by as much as it has taken.
"""

import random
import sys
import sysconfig
import threading
import time
from collections import defaultdict
from contextlib import suppress
from pathlib import Path

import torch

from hpctrain.training.measuring.slow_ranks import WorkClock

_EVERY_S, _LOOK_S, _LATE_S = 0.05, 0.002, 0.012
_TORCH, _OURS = (str(Path(file).parent) for file in (torch.__file__, Path(__file__).parents[1]))
_STDLIB = sysconfig.get_path("stdlib")
_LOADING = f"{_OURS}/data/loading/"  # what waits there is counted as a wait for data


class BlockedClock:
    """Measures the seconds that the thread that makes it has been blocked in the user's own code.

    A thread that drives a GPU (`on_gpu`) waits whatever it does there.
    """

    def __init__(self, on_gpu: bool) -> None:
        self.seconds, self._on_gpu = 0.0, on_gpu
        self._of, self._work = threading.get_ident(), WorkClock()
        self._state = f"/proc/self/task/{threading.get_native_id()}/stat"
        self._places: defaultdict[str, float] = defaultdict(float)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hpctrain-blocked", daemon=True)

    def start(self) -> None:
        """Begin to look."""
        self._thread.start()

    def take_place(self) -> str:
        """Return where it was blocked most since the last call; "" if it was not."""
        places, self._places = self._places, defaultdict(float)
        return max(places, key=places.__getitem__, default="")

    def close(self) -> None:
        """End the looking."""
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()
        self._work.close()

    def _run(self) -> None:
        at, worked = time.monotonic(), self._work()
        # A pause that varies does not beat with the steps. The training draws from the global one.
        own = random.Random()
        while not self._over.wait(pause := _EVERY_S * own.uniform(0.7, 1.3)):
            place = self._place()
            blocked = bool(place) and (self._on_gpu or self._is_asleep(place))
            now, work = time.monotonic(), self._work()
            seconds = now - at if blocked else 0.0
            if not blocked and now - at - pause > _LATE_S:  # nobody could look
                place = self._place()
                seconds = now - at - (work - worked) if place else 0.0
            if seconds > 0:
                self.seconds += seconds
                self._places[place] += seconds
            at, worked = now, work

    def _is_asleep(self, place: str) -> bool:
        """Return whether it is still there after a while, has had no core, and asks for none."""
        worked = self._work()
        time.sleep(_LOOK_S)
        if self._work() - worked > _LOOK_S / 4 or self._place() != place:
            return False
        with suppress(OSError), open(self._state) as file:
            return file.read().rpartition(")")[2].split()[0] in "SD"
        return True

    def _place(self) -> str:
        """Return the line of the user's code in which the thread is; "" if it is elsewhere."""
        frame = sys._current_frames().get(self._of)
        found = ""
        while frame is not None:
            file = frame.f_code.co_filename
            if file.startswith(_LOADING) or (not found and file.startswith((_TORCH, _OURS))):
                return ""
            if not found and not _is_of_python(file):
                found = f"{file}:{frame.f_lineno} in {frame.f_code.co_name}"
            frame = frame.f_back
        return found


def _is_of_python(file: str) -> bool:
    return file.startswith("<frozen") or (file.startswith(_STDLIB) and "-packages" not in file)
