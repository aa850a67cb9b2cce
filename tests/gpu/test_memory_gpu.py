"""The peak of a step's memory beside what `plan` predicts; tests/plan/test_accuracy.py has CPUs."""

import gc
from collections.abc import Callable

import pytest
import torch

from tests.gpu.device import CUDA, REHEARSAL, cuda_group, on_device  # noqa: F401  a fixture
from tests.parallel.parity import spread
from tests.plan.accuracy import KINDS, Case, measured, predicted
from tests.steps import step_of

pytestmark = on_device


@pytest.mark.usefixtures("group_of_one" if REHEARSAL else "cuda_group")
@pytest.mark.parametrize("mode", ["none", "selective", "full"])
def test_the_peak_is_the_predicted_one(
    mode: str, record_property: Callable[[str, object], None]
) -> None:
    case = Case("Transformer", 4 if REHEARSAL else 128, mode, compute="bf16")
    peak, expected = measured(case) if REHEARSAL else peak_of(case), predicted(case).tensors
    record_property(f"{mode}: measured MiB", peak / 2**20)
    record_property(f"{mode}: predicted MiB", expected / 2**20)
    assert expected == pytest.approx(peak, rel=0.1 if REHEARSAL else 0.2)


def peak_of(case: Case) -> int:
    """Return the bytes at the peak of the second step, without the batch."""
    gc.collect()  # models of earlier tests
    before = torch.cuda.memory_allocated()
    build, task, batch_of = KINDS[case.kind]
    model = spread(build, case.config, CUDA)
    optimizer = torch.optim.AdamW(model.parameters, fused=True)
    step = step_of(model, task, optimizer, clip_norm=1.0)
    batch = {name: values.to(CUDA) for name, values in batch_of(case.rows).items()}
    step(batch, 0.1)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    step(batch, 0.1)
    torch.cuda.synchronize()
    own = before + sum(values.nbytes for values in batch.values())
    return torch.cuda.max_memory_allocated() - own
