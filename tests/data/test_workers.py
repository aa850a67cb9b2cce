import contextlib
import gc
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import worker_parts
from hypothesis import given, settings
from hypothesis import strategies as st
from worker_parts import FIXED, IMAGES, TEXTS, Source, children, run

from hpctrain.data.workers.pool import Workers
from hpctrain.data.workers.process import AllRandom
from hpctrain.data.workers.samples import SampleRandom
from hpctrain.errors import ConfigError, DataError


def equal(a, b):
    return a.keys() == b.keys() and all(
        a[name].dtype == b[name].dtype and np.array_equal(a[name], b[name]) for name in a
    )


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def wait_for(condition, what, seconds=60):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


@pytest.mark.parametrize("into", [True, False])
def test_the_result_is_the_same_as_that_of_a_plain_loop(into):
    random = np.random.Generator(np.random.Philox(key=[5, 2], counter=[0, 30, 0, 0]))
    expected = worker_parts.augment(
        {"image": IMAGES[33].copy(), "label": np.int64(33), "text": TEXTS[33]}, random
    )
    with Workers(Source(into=into), worker_parts.augment, 2) as workers:
        batch = run(workers, 30, 40, (5, 2), shift=3).result(60)
    assert {name: value[0].tolist() for name, value in batch.items()} == {
        name: np.asarray(value).tolist() for name, value in expected.items()
    }
    assert batch["image"].dtype == np.float32
    assert batch["image"].shape == (10, 1, 3, 4)
    assert batch["label"].tolist() == list(range(33, 43))
    assert batch["length"].tolist() == [i % 5 for i in range(33, 43)]


def test_the_same_for_every_number_of_workers_and_size_of_batch():
    def everything(count, size):
        with Workers(Source(), worker_parts.augment, count) as workers:
            futures = [run(workers, i, min(i + size, 90), (-1, 7)) for i in range(0, 90, size)]
            batches = [future.result(60) for future in futures]
            return {name: np.concatenate([b[name] for b in batches]) for name in batches[0]}

    expected = everything(0, 90)
    assert len(np.unique(expected["noise"])) == 180
    assert equal(everything(1, 10), expected)
    assert equal(everything(3, 7), expected)


def test_global_generators_are_those_of_a_sample():
    def everything(count, size):
        with Workers(Source(), worker_parts.of_global_generators, count) as workers:
            futures = [run(workers, i, min(i + size, 30), (3, 7)) for i in range(0, 30, size)]
            return np.concatenate([future.result(60)["drawn"] for future in futures])

    drawn = everything(1, 10)
    assert len(np.unique(drawn)) == drawn.size == 60
    assert np.array_equal(drawn, everything(2, 7))
    draws = AllRandom()
    of_torch = [(draws.at(3, 7, position), torch.rand(()).item())[1] for position in (1, 2, 1)]
    assert of_torch[0] == of_torch[2] != of_torch[1]


@settings(max_examples=50, deadline=None)
@given(
    one=st.tuples(st.integers(-3, 2**64), st.integers(0, 99), st.integers(0, 2**62)),
    two=st.tuples(st.integers(-3, 2**64), st.integers(0, 99), st.integers(0, 2**62)),
)
def test_random_numbers_are_a_function_of_seed_epoch_and_position(one, two):
    random, other = SampleRandom(), SampleRandom()
    first = random.at(*one).random(9)
    random.generator.integers(5, dtype=np.uint32)  # leaves half of a random word unused
    second = random.at(*two).random(9)
    assert other.at(*two).random(9).tolist() == second.tolist()
    assert other.at(*one).random(9).tolist() == first.tolist()
    same = (one[0] % 2**64, *one[1:]) == (two[0] % 2**64, *two[1:])
    assert (first.tolist() == second.tolist()) == same


def test_batches_keep_their_values_while_they_are_held():
    with Workers(FIXED, worker_parts.same, 2) as workers:
        held = [run(workers, i, i + 10).result(60)["label"] for i in range(0, 90, 10)]
        again = [run(workers, i, i + 10).result(60)["label"] for i in range(0, 90, 10)]
    del workers
    gc.collect()
    assert np.concatenate(held).tolist() == np.concatenate(again).tolist() == list(range(90))


def test_results_larger_than_their_samples():
    with Workers(FIXED, worker_parts.repeat, 1) as workers:
        for size in (1, 50, 7, 100):
            batch = run(workers, 0, size).result(60)
            assert batch["image"].shape == (size, 2000, 3, 4)
            assert (batch["image"][:, ::1000] == IMAGES[:size]).all()


def test_the_process_of_a_worker():
    with Workers(FIXED, worker_parts.report, 2) as workers:
        batches = [run(workers, i, i + 1).result(60) for i in range(6)]
        first = batches[0]
        assert {int(batch["pid"][0]) for batch in batches} <= set(children())
        job = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
        assert all(first["ignored"][0, number - 1] for number in job)
        assert first["blocked"].tolist() == [0]
        assert first["torch"].tolist() == [False]
        assert first["threads"].tolist() == [1]
        for pid in children():
            for number in job:
                os.kill(pid, number)
        assert run(workers, 0, 3).result(60)["pid"][0] in children()
    assert children() == []


def test_closing_ends_a_worker_during_a_transform():
    workers = Workers(FIXED, worker_parts.sleep_for_ever, 2)
    futures = [run(workers, 0, 2) for _ in range(5)]
    wait_for(lambda: len(children()) == 2, "the workers start")
    workers.close()  # the transform itself would take longer than the time limit of the test
    assert children() == []
    for future in futures:
        with pytest.raises(DataError, match="are closed"):
            future.result(0)
    with pytest.raises(DataError, match="are closed"):
        run(workers, 0, 2)
    workers.close()


def test_an_error_names_the_worker_that_died():
    words = "was killed by SIGKILL while it transformed samples 10, 11, 12, 13, 14, ..."
    with Workers(FIXED, partial(worker_parts.end, how="kill"), 2) as workers:
        run(workers, 0, 2).result(60)
        futures = [run(workers, 10, 20)]
        with contextlib.suppress(DataError):  # it may have died before all are submitted
            futures.extend(run(workers, 10, 20) for _ in range(3))
        for future in futures:
            with pytest.raises(DataError) as error:
                future.result(60)
            assert words in str(error.value)
            assert str(error.value).startswith("worker ")
        with pytest.raises(DataError, match=r"worker \d of the data"):
            run(workers, 0, 2)
    assert children() == []


@pytest.mark.parametrize("count", [0, 2])
def test_an_exception_of_the_transform_keeps_its_type(count):
    with Workers(FIXED, partial(worker_parts.end, how="kept"), count) as workers:
        with pytest.raises(worker_parts.Kept) as error:
            run(workers, 5, 9, (0, 3), shift=6).result(60)
        notes = "\n".join(error.value.__notes__)
        assert (
            "in the transform of sample 13 (position 7 of epoch 3), whose fields are "
            "image uint8[2, 3, 4], label int64" in notes
        )
        if count:
            assert 'worker_parts.py", line' in notes
            assert "In worker process" in notes
        assert run(workers, 0, 2).result(60)["label"].tolist() == [0, 1]  # the workers still work


@pytest.mark.parametrize("count", [0, 1])
@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("dtype", "returned 'label' as float32 for sample 13 and as int64 for sample 10"),
        ("shape", "returned 'image' as uint8[2, 2, 4] for sample 13 and as uint8[2, 3, 4]"),
        ("field", "returned image uint8[2, 3, 4] for sample 13, and image, label for sample 10"),
        ("text", "returned 'label' as <U8 for sample 13"),
        ("nothing", "no field for sample 13"),
        ("none", "returned NoneType for sample 13; it must return a dict of fields"),
    ],
)
def test_results_that_differ_or_are_not_arrays_are_refused(count, how, words):
    with Workers(FIXED, partial(worker_parts.end, how=how), count) as workers:
        start = 13 if how in ("text", "nothing", "none") else 10
        with pytest.raises(DataError) as error:
            run(workers, start, 20).result(60)
        assert words in str(error.value)


@pytest.mark.parametrize("transform", [lambda sample, random: sample, partial(map, lambda x: x)])
def test_a_transform_that_cannot_be_pickled(transform):
    with pytest.raises(ConfigError, match=r"cannot be sent to worker processes.*no lambda"):
        Workers(FIXED, transform, 1)
    Workers(FIXED, transform, 0).close()


def test_too_little_memory(monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    with Workers(FIXED, worker_parts.same, 1) as workers:
        monkeypatch.setattr(os, "posix_fallocate", full)
        with pytest.raises(DataError, match=r"no memory to share a batch of .* No space left"):
            run(workers, 0, 2)


SCRIPT = """
import sys, time
sys.path.insert(0, {folder!r})
import numpy as np
import worker_parts
from hpctrain.data.workers.pool import Workers

def double(sample, random):
    return {{"label": 2 * sample["label"]}}

{guard}
    workers = Workers(worker_parts.FIXED, double, 2)
    print(worker_parts.run(workers, 0, 3).result(60)["label"].tolist(), flush=True)
"""


def script(tmp_path, guard, more=""):
    path = tmp_path / "training.py"
    path.write_text(SCRIPT.format(folder=str(Path(__file__).parent), guard=guard) + more)
    return [sys.executable, str(path)]


def ended(command, **options):
    """Run a program to its end, and return how it ended and what it said."""
    return subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=False, **options
    )


def test_a_transform_of_the_script_itself(tmp_path):
    """The script leaves the workers open when it ends."""
    done = ended(script(tmp_path, "if __name__ == '__main__':"))
    assert (done.returncode, done.stdout, done.stderr) == (0, "[0, 2, 4]\n", "")


def test_a_killed_trainer_leaves_nothing_behind(tmp_path):
    more = """
    busy = Workers(worker_parts.FIXED, worker_parts.sleep_for_ever, 2)
    futures = [worker_parts.run(busy, 0, 50) for _ in range(10)]
    time.sleep(1)
    print(*worker_parts.children(), flush=True)
    time.sleep(100)
"""
    before = set(os.listdir("/dev/shm"))
    command = script(tmp_path, "if __name__ == '__main__':", more)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as trainer:
        trainer.stdout.readline()
        pids = [int(pid) for pid in trainer.stdout.readline().split()]
        assert len(pids) == 4
        assert all(alive(pid) for pid in pids)
        trainer.kill()
        wait_for(lambda: not any(alive(pid) for pid in pids), "the workers end")
    mine = {name for name in set(os.listdir("/dev/shm")) - before if "hpctrain" in name}
    assert mine == set()
