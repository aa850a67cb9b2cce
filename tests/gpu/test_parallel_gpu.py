"""Compares precision, offload, checkpointing and compilation with plain fp32 on the same GPU."""

import functools
import gc
import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch

from hpctrain.engine.layers.gpu_support import can
from hpctrain.engine.supervised.micro_batches import GpuMemory, MicroBatches
from hpctrain.models import Transformer
from hpctrain.tasks import LanguageModel
from tests.gpu.device import CUDA, cuda_group, on_gpu, tokens  # noqa: F401  a fixture
from tests.parallel.parity import spread
from tests.steps import config_with, step_of

pytestmark = [*on_gpu, pytest.mark.usefixtures("cuda_group")]

STEPS, VOCABULARY = 20, 512
FIRST_SCALE = 65536  # initial scale of the loss in fp16
Keys = dict[str, Any]
OFFLOAD: Keys = {"parallel.fsdp.offload": True}


class Small(GpuMemory):
    """The memory of a smaller GPU."""

    def __init__(self, size: float) -> None:
        self._size = size

    def size(self) -> float:
        return self._size


class Trained(NamedTuple):
    """The losses of a training, the scale of the loss at its end, and its bytes on the GPU.

    `peak` is the most bytes in the last step; `between` is the bytes held after it.
    """

    losses: list[float]
    scale: float
    peak: int
    between: int


def train(
    keys: Keys,
    *,
    dim: int = 256,
    rows: int = 8,
    length: int = 128,
    steps: int = STEPS,
    memory: GpuMemory | None = None,
    found: list[int] | None = None,
) -> Trained:
    """Train a Transformer on the same batch again and again, which it learns by heart.

    With `memory` micro-batches become as large as fits; `found` gets their rows.
    """
    gc.collect()  # models of earlier trainings
    before = torch.cuda.memory_allocated()
    build = functools.partial(Transformer, VOCABULARY, dim, 4, 8, 4)
    model = spread(build, config_with(keys), CUDA)
    optimizer = torch.optim.AdamW(model.parameters, lr=1e-3)
    sizes = None
    if memory is not None and found is not None:
        sizes = MicroBatches(model, rows, found.append, memory)
    task = LanguageModel()
    step = step_of(model, task, optimizer, clip_norm=1.0)
    batch, losses = tokens(rows, length, VOCABULARY), []
    for i in range(steps):
        if i == steps - 1:  # the first step made the optimizer's state, so the peak includes it
            torch.cuda.reset_peak_memory_stats()
        step(batch, 1e-3)
        sizes.after_step(i, batch)
        losses.append(step.totals.means()["loss"])
    return Trained(
        losses,
        model.precision.scale,
        torch.cuda.max_memory_allocated() - before,
        torch.cuda.memory_allocated() - before,
    )


@functools.cache
def reference() -> list[float]:
    losses = train({}).losses
    assert losses[-1] < losses[0] - 0.5, "it must learn"
    return losses


@pytest.mark.parametrize(
    ("keys", "tolerance"),
    [
        ({"precision.compute": "tf32"}, 1e-2),
        ({"precision.compute": "bf16"}, 2e-2),
        ({"precision.compute": "bf16", "precision.params": "bf16"}, 1e-1),
        (OFFLOAD, 1e-3),  # the optimizer runs on the CPU
        (OFFLOAD | {"precision.compute": "bf16"}, 2e-2),
        ({"train.activation_checkpointing": "full"}, 1e-4),
        ({"train.activation_checkpointing": "selective"}, 1e-4),
        ({"train.activation_checkpointing": "full", "precision.compute": "bf16"}, 2e-2),
        ({"train.compile": "blocks"}, 1e-3),
        ({"train.compile": "model"}, 1e-3),
        ({"train.compile": "blocks", "precision.compute": "bf16"}, 2e-2),
        ({"train.compile": "blocks", "train.activation_checkpointing": "selective"}, 1e-3),
        ({"train.compile": "blocks", "train.activation_checkpointing": "full"}, 1e-3),
        ({"train.compile": "model", "train.activation_checkpointing": "selective"}, 1e-3),
        ({"train.compile": "model", "train.activation_checkpointing": "full"}, 1e-3),
        ({"train.accumulate": 4}, 1e-3),
    ],
    ids=str,
)
def test_losses_of_fp32(
    keys: Keys, tolerance: float, record_property: Callable[[str, object], None]
) -> None:
    trained, expected = train(keys), reference()
    worst = max(abs(a / b - 1) for a, b in zip(trained.losses, expected, strict=True))
    record_property(f"{keys}: worst loss difference", worst)
    record_property(f"{keys}: peak bytes", trained.peak)
    assert trained.losses == pytest.approx(expected, rel=tolerance)


@pytest.mark.parametrize("keys", [{}, OFFLOAD], ids=str)
def test_losses_of_fp16_with_its_scale(keys: Keys) -> None:
    """The scale of the loss begins too high, so some of the first steps overflow and are skipped.

    The step after a skipped one has the same loss.
    """
    trained = train(keys | {"precision.compute": "fp16"})
    skipped = round(math.log2(FIRST_SCALE / trained.scale))
    assert 0 <= skipped <= 8
    made = [loss for loss, _ in itertools.groupby(trained.losses)]
    assert len(made) == len(trained.losses) - skipped
    assert made == pytest.approx(reference()[: len(made)], rel=1e-2)


@pytest.mark.parametrize("compute", ["fp32", "bf16"])
def test_checkpointing_needs_less_memory(compute: str) -> None:
    peaks = {
        mode: train(
            {"train.activation_checkpointing": mode, "precision.compute": compute},
            dim=512,
            rows=16,
            length=512,
            steps=3,
        ).peak
        for mode in ("none", "selective", "full")
    }
    assert peaks["none"] > peaks["selective"] > peaks["full"]


def test_auto_takes_the_largest_micro_batch_that_fits() -> None:
    sizes: dict[str, int] = {"dim": 256, "rows": 32, "length": 512, "steps": 6}
    of_8_rows = train({"train.accumulate": 4}, **sizes)
    before = torch.cuda.memory_allocated()
    found: list[int] = []
    # Nine tenths of the memory are used: 8 rows fit in it, and 16 do not.
    auto = train({}, **sizes, memory=Small((before + 1.2 * of_8_rows.peak) / 0.9), found=found)
    assert found == [8]
    assert auto.losses == pytest.approx(of_8_rows.losses, rel=1e-3)
    assert auto.peak < 1.2 * of_8_rows.peak
    found.clear()
    train({}, **sizes, memory=GpuMemory(), found=found)
    assert found == [32], "the whole share fits in a GPU"


def test_offload_leaves_the_gpu_empty_between_steps() -> None:
    sizes = {"dim": 1024, "rows": 1, "length": 32, "steps": 2}
    kept, moved = train({}, **sizes), train(OFFLOAD, **sizes)
    assert moved.between < 0.3 * kept.between
    assert moved.peak < kept.peak


@pytest.mark.skipif(
    torch.cuda.is_available() and not can("fp8", CUDA), reason="there is no CUDA device with fp8"
)
def test_losses_of_fp8() -> None:
    pytest.importorskip("torchao", reason="torchao is needed")
    assert train({"precision.compute": "fp8"}).losses == pytest.approx(reference(), rel=5e-2)
