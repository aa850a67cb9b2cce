"""Worker processes do each task once, and the parent reports how a worker process failed."""

import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from data_prep import processes
from data_prep.writing.convert import convert
from hpctrain.errors import StorageError
from tests.data_prep.crash import content
from tests.data_prep.hand import Row, hand, options


class Square:
    def __call__(self, number, progress):
        for _ in range(number):
            progress(1, 10)
        return number * number, os.getpid()


@pytest.mark.parametrize("workers", [1, 2])
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
    """Tasks of two parts: the second part waits until the next task has begun."""

    folder: Path
    last: int

    def begin(self, number, progress):
        (self.folder / str(number)).touch()
        return f"begun {number}"

    def finish(self, number, returned):
        assert returned == f"begun {number}"
        end = time.monotonic() + 60
        while number < self.last and not (self.folder / str(number + 1)).exists():
            assert time.monotonic() < end, f"{number} is alone"
            time.sleep(0.01)
        if number == 3:
            raise StorageError(f"no room for {number}")
        return number, os.getpid()


def test_a_task_is_finished_beside_the_next_in_this_process(tmp_path):
    tasks, here = Meets(tmp_path, 2), os.getpid()
    done = processes.run(tasks.begin, range(3), 2, print, tasks.finish)
    assert sorted(done) == [(number, (number, here)) for number in range(3)]


@pytest.mark.parametrize("workers", [1, 2])
def test_an_error_of_the_second_part_is_raised(workers, tmp_path):
    tasks, seen = Meets(tmp_path, 2), []
    done = processes.run(tasks.begin, range(2, 6), workers, print, tasks.finish)
    with pytest.raises(StorageError, match="no room for 3"):
        seen.extend(number for number, _ in done)
    assert 3 not in seen


@pytest.mark.parametrize(
    ("act", "error", "said"),
    [
        ("kill:9", StorageError, r"died at piece 1: SIGKILL \(out of memory\? --workers takes"),
        ("raise:odd", RuntimeError, "^Odd: odd"),
    ],
)
def test_a_worker_that_fails_is_told_of(tmp_path, act, error, said):
    rows = [[Row(0)], [Row(1)], [Row(2)]]
    with pytest.raises(error, match=said) as caught:
        convert(hand(*rows, act=act), tmp_path / "OUT", options(workers=2))
    if error is not StorageError:  # a bug keeps the traceback of the worker process
        assert "in misbehave" in str(caught.value.__cause__)
    # The same command goes on, because `act` is not part of the identity of the source.
    convert(hand(*rows), tmp_path / "OUT", options())
    convert(hand(*rows), tmp_path / "REF", options())
    assert content(tmp_path / "OUT") == content(tmp_path / "REF")


def leave(number, progress):
    sys.exit(number)


def test_a_task_that_exits_is_an_error():
    with pytest.raises(RuntimeError, match=r"SystemExit: [01]"):
        list(processes.run(leave, range(2), 2, print))
