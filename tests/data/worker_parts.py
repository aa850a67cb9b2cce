"""Provides data and transforms for the tests of worker processes; it must not import torch."""

import os
import random as python_random
import signal
import time
from contextlib import suppress
from pathlib import Path

import numpy as np

from hpctrain.data import source
from hpctrain.data.shards.field import Field
from hpctrain.data.shards.ragged import Ragged

COUNT = 100
IMAGES = np.random.default_rng(0).integers(0, 255, (COUNT, 2, 3, 4), dtype=np.uint8)
TEXTS = [np.arange(i % 5, dtype=np.uint16) for i in range(COUNT)]


class Source(source.Source):
    """A source of images, labels and texts; with `into`, `read` fills the given arrays."""

    def __init__(self, fields=("image", "label", "text"), into=True):
        everything = {
            "image": Field("uint8", (2, 3, 4)),
            "label": Field("int64"),
            "text": Field("uint16", variable=True),
        }
        self.fields = {name: everything[name] for name in fields}
        self.into = into

    def read(self, indices, out=None):
        rows = {
            "image": IMAGES[indices],
            "label": np.asarray(indices),
            "text": Ragged.of([TEXTS[i] for i in indices]),
        }
        rows = {name: rows[name] for name in self.fields}
        for name, array in (out or {}).items():
            if self.into:
                array[...] = rows[name]
                rows[name] = array
        return rows


FIXED = Source(("image", "label"))


def run(workers, start, stop, key=(0, 0), shift=0):
    """Submit the positions from `start` to `stop`; position p has sample (p + shift) % COUNT.

    `key` is (seed, epoch). Returns the future of the batch.
    """
    positions = np.arange(start, stop)
    return workers.submit(key, positions, (positions + shift) % COUNT)


def children():
    """Return the pids of the worker processes of this process that still exist."""
    path = Path(f"/proc/{os.getpid()}/task")
    found = []
    for task in path.iterdir():
        with suppress(FileNotFoundError):  # a thread has ended
            found.append(task.joinpath("children").read_text().split())
    return sorted(int(pid) for pids in found for pid in pids if _is_worker(pid))


def _is_worker(pid):
    # The servers and ranks of the tests are children of this process, too.
    try:
        line = Path(f"/proc/{pid}/cmdline").read_bytes()
    except FileNotFoundError:  # the process ended meanwhile
        return False
    return b"hpctrain.data.workers.process" in line or not line  # empty for an ended process


def augment(sample, random):
    """Use random numbers, change dtype and shape, and write into the given arrays."""
    image = sample["image"]
    image += 1
    if random.random() < 0.5:
        image = image[:, ::-1]
    noise = random.standard_normal(2)
    return {
        "image": image[:1].astype(np.float32) * np.float32(noise[0]),
        "label": sample["label"],
        "length": len(sample["text"]),
        "last": np.uint16(sample["text"].sum()),
        "noise": noise,
        "whole": random.integers(1000),
    }


def same(sample, random):
    return sample


def of_global_generators(sample, random):
    return {"drawn": [python_random.random(), np.random.rand()]}  # noqa: NPY002


def report(sample, random):
    """Return facts about the process that runs the transform."""
    import sys

    ignored = [signal.getsignal(number) == signal.SIG_IGN for number in range(1, 20)]
    return {
        "pid": os.getpid(),
        "torch": "torch" in sys.modules,
        "threads": int(os.environ["OMP_NUM_THREADS"]),
        "ignored": np.array(ignored),
        "blocked": len(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
    }


def sleep_for_ever(sample, random):
    time.sleep(1000)
    return sample


class Kept(ValueError):
    """An exception that can be pickled and unpickled."""


def end(sample, random, how):
    """Return the sample; for the one with label 13, fail in the way that `how` names."""
    if sample["label"] != 13:
        return sample
    match how:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "kept":
            raise Kept("thirteen")
        case "dtype":
            return sample | {"label": np.float32(0)}
        case "shape":
            return sample | {"image": sample["image"][:, :2]}
        case "field":
            return {"image": sample["image"]}
        case "text":
            return sample | {"label": "thirteen"}
        case "nothing":
            return {}
        case "none":
            return None


def repeat(sample, random):
    return {"image": np.repeat(sample["image"], 1000, axis=0)}
