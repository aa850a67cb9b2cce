"""A GPU whose memory is full: the step is made again with smaller micro-batches.

Only a GPU runs out of memory like this, so a rehearsal leaves it out.
"""

import gc
from collections.abc import Callable

import pytest
import torch
from torch import nn

from hpctrain.config.rules.degrees import Degrees
from hpctrain.config.schema import PrecisionConfig
from hpctrain.faults.stop import Stop
from hpctrain.models import Transformer
from hpctrain.parallel.mesh import Mesh
from hpctrain.parallel.micro_batches import MicroBatches
from hpctrain.parallel.precision import Precision
from hpctrain.parallel.wrappers.parallel_model import ParallelModel
from hpctrain.tasks import LanguageModel
from hpctrain.training.step import TrainStep
from tests.gpu.device import DEVICE, needs_gpu, tokens

pytestmark = [pytest.mark.gpu, needs_gpu, pytest.mark.usefixtures("group_of_one")]
ROWS, LENGTH, VOCABULARY, STEPS = 64, 256, 4096, 4


def model() -> nn.Module:
    torch.manual_seed(0)
    return Transformer(VOCABULARY, 256, 4, 8, 4)


def trained(
    accumulate: int, record: Callable[[int], None], before_last: Callable[[], None]
) -> list[float]:
    """Return the losses of some steps; `before_last` is called before the last one."""
    mesh = Mesh(Degrees(), 0, DEVICE)
    spread = ParallelModel(
        model().to(DEVICE), mesh, Precision(PrecisionConfig(), DEVICE), accumulate
    )
    optimizer = torch.optim.AdamW(spread.parameters, lr=1e-3)
    sizes = MicroBatches(spread, ROWS, record)
    # The logits of all positions at once: what does not fit must not be hidden by small chunks.
    step = TrainStep(
        *(spread, LanguageModel(chunk=ROWS * LENGTH), optimizer),
        clip_norm=1.0,
        stop=Stop(),
        micro_batches=sizes,
    )
    batch, losses = tokens(ROWS, LENGTH, VOCABULARY, DEVICE), []
    for number in range(STEPS):
        if number == STEPS - 1:
            before_last()
        step(batch, 1e-3)
        losses.append(step.totals.means()["loss"])
    return losses


def test_a_step_that_runs_out_of_memory_is_made_again(
    record_property: Callable[[str, object], None],
) -> None:
    found: list[int] = []
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    expected = trained(1, found.append, lambda: None)
    peak = torch.cuda.max_memory_allocated()
    assert found == []
    gc.collect()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(DEVICE).total_memory

    def fill() -> None:
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(0.7 * peak / total, DEVICE)

    try:
        losses = trained(1, found.append, fill)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, DEVICE)
    record_property("peak_bytes", peak)
    record_property("rows_after_out_of_memory", found[-1] if found else ROWS)
    assert found
    assert found[-1] < ROWS
    assert losses == pytest.approx(expected, rel=1e-4)
