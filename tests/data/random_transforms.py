"""Transforms that are random in many ways, and some that are not."""

import functools
import random as python_random

import numpy as np
import torch

OWN = np.random.default_rng(0)


def scale(sample, random):
    return {**sample, "x": sample["x"].astype(np.float32) / 255}


def flip(sample, random):
    return {**sample, "x": sample["x"][::-1]} if random.random() < 0.5 else sample


def flip_and_scale(sample, random):
    return scale(flip(sample, random), random)


def noise(sample, random):
    return {**sample, "x": sample["x"] + random.integers(1, 9, dtype=sample["x"].dtype)}


def rarely(sample, random):
    """No sample that is tried has this label."""
    return flip(sample, random) if sample["label"] == 99 else sample


def spawned(sample, random):
    return flip(sample, random.spawn(1)[0])


def of_numpy(sample, random):
    return {**sample, "x": sample["x"][::-1]} if np.random.rand() < 0.5 else sample  # noqa: NPY002


def of_python(sample, random):
    return {**sample, "x": sample["x"][::-1]} if python_random.random() < 0.5 else sample


def of_torch(sample, random):
    return {**sample, "x": sample["x"][::-1]} if torch.rand(()) < 0.5 else sample


def of_its_own(sample, random):
    return {**sample, "x": sample["x"][::-1]} if OWN.random() < 0.5 else sample


class Flip:
    def __init__(self, p):
        self.p = p

    def __call__(self, sample, random):
        return {**sample, "x": sample["x"][::-1]} if random.random() < self.p else sample


class Every:
    """It draws nothing, and gives another result at every second call."""

    calls = 0

    def __call__(self, sample, random):
        self.calls += 1
        return {**sample, "x": sample["x"][::-1]} if self.calls % 2 else sample


class Marked(Flip):
    random = True


class NotMarked(Flip):
    """The name is that of a generator here, and says nothing."""

    def __init__(self):
        super().__init__(0.5)
        self.random = np.random.default_rng(0)


def marked(sample, random):
    return flip_and_scale(sample, random)


marked.random = True  # type: ignore[attr-defined]
partial = functools.partial(marked)


def batch_scale(batch, draws):
    return batch | {"x": batch["x"].float() / 255}


def batch_flip(batch, draws):
    chosen = (draws.uniform() < 0.5)[:, None]
    return batch | {"x": torch.where(chosen, batch["x"].flip(1), batch["x"])}


def batch_noise(batch, draws):
    return batch | {"x": batch["x"] + draws.integers(9)[:, None] + 1}


def batch_of_torch(batch, draws):
    chosen = (torch.rand(len(batch["x"])) < 0.5)[:, None]
    return batch | {"x": torch.where(chosen, batch["x"].flip(1), batch["x"])}


def batch_rarely(batch, draws):
    return batch_flip(batch, draws) if (batch["label"] == 99).any() else batch
