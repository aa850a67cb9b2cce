import ctypes
import mmap
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from data_prep import processes
from data_prep.convert import convert
from hpctrain.errors import StorageError
from tests.data_prep.crash import content
from tests.data_prep.hand import Row, hand, options


class Square:
    def __call__(self, number, progress):
        for _ in range(number):
            progress(1, 10)
        return lambda: (number * number, os.getpid())


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_each_number_is_done_once(workers):
    counted = [0, 0]

    def progress(samples, nbytes):
        counted[0] += samples
        counted[1] += nbytes

    done = dict(processes.run(Square(), range(1, 5), workers, progress))
    assert {number: square for number, (square, _) in done.items()} == {1: 1, 2: 4, 3: 9, 4: 16}
    assert counted == [10, 100]
    assert (os.getpid() in {pid for _, pid in done.values()}) == (workers == 1)
    assert list(processes.run(Square(), [], workers, progress)) == []


@dataclass(frozen=True)
class Meets:
    """What is left of each task waits for the next to begin."""

    folder: Path
    last: int

    def __call__(self, number, progress):
        (self.folder / str(number)).touch()
        return partial(self.rest, number)

    def rest(self, number):
        end = time.monotonic() + 20
        while number < self.last and not (self.folder / str(number + 1)).exists():
            assert time.monotonic() < end, f"{number} is alone"
            time.sleep(0.01)
        if number == 3:
            raise StorageError(f"no room for {number}")
        return number


@pytest.mark.parametrize("workers", [1, 2])
def test_what_is_left_to_do_is_done_beside_the_next(workers, tmp_path):
    tasks = Meets(tmp_path, 2)
    assert sorted(processes.run(tasks, range(3), workers, print)) == [(0, 0), (1, 1), (2, 2)]
    seen = []
    with pytest.raises(StorageError, match="no room for 3"):
        seen.extend(number for number, _ in processes.run(tasks, range(2, 6), workers, print))
    assert 3 not in seen


@pytest.mark.parametrize(
    ("act", "error", "said"),
    [
        ("kill:9", StorageError, r"died at piece 1: SIGKILL \(out of memory\? --workers takes"),
        (f"kill:{signal.SIGSEGV}", StorageError, "died at piece 1: SIGSEGV; the same command"),
        ("exit:3", StorageError, "died at piece 1: exit code 3; the same command goes on"),
        ("raise:it", ZeroDivisionError, "^it"),
        ("raise:odd", RuntimeError, "^Odd: odd"),
    ],
)
def test_a_worker_that_fails_is_told_of(tmp_path, act, error, said):
    rows = [[Row(0)], [Row(1)], [Row(2)]]
    with pytest.raises(error, match=said) as caught:
        convert(hand(*rows, act=act), tmp_path / "OUT", options(workers=2))
    if error is not StorageError:  # a bug keeps its traceback, of the worker too
        assert "in misbehave" in caught.value.__notes__[0]
    # The same command goes on; its act is no part of what it is.
    convert(hand(*rows), tmp_path / "OUT", options(workers=2))
    convert(hand(*rows), tmp_path / "REF", options())
    assert content(tmp_path / "OUT") == content(tmp_path / "REF")


def test_interrupts_are_for_the_parent_alone():
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    with processes._without_interrupts():
        assert signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, [])
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == before


FAULTS = """
import resource, sys
import numpy as np
from data_prep.processes import keep_memory
if sys.argv[1] == "keep":
    keep_memory()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(100):
    for block in [np.ones(2**23, np.uint8) for _ in range(4)]:
        del block
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="this libc has no mallopt")
def test_what_is_freed_is_kept():
    """Pages that the system cleared; otherwise each block's are, each time."""

    def faults(how):
        command = [sys.executable, "-c", FAULTS, how]
        # Huge pages would be few either way.
        environment = os.environ | {"NUMPY_MADVISE_HUGEPAGE": "0"}
        return int(subprocess.check_output(command, env=environment))

    once = 4 * 2**23 // mmap.PAGESIZE
    # How many there are otherwise is glibc's matter: it learns, and forgets.
    assert faults("keep") < 1.3 * once < faults("as it is")
