"""Compares a training on a GPU with the same training on the CPU."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.conftest import Completed, journal_metrics, runs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]


@pytest.mark.parametrize(("compute", "tolerance"), [("fp32", 1e-3), ("bf16", 5e-2)])
def test_the_gpu_gives_the_loss_of_the_cpu(
    train: Callable[..., Completed], tmp_path: Path, compute: str, tolerance: float
) -> None:
    short = ("train.max_steps=20", "train.log_every=1", "tracking.upload=false")
    losses = {}
    for device in ("cpu", "cuda"):
        folder = tmp_path / device
        train(
            *short,
            f"precision.compute={compute}",
            f"parallel.device={device}",
            f"output_dir={folder}",
        )
        (run,) = runs(folder)
        losses[device] = {
            key: value for key, value in journal_metrics(run).items() if key[0].endswith("loss")
        }
    assert losses["cuda"] == pytest.approx(losses["cpu"], rel=tolerance)
