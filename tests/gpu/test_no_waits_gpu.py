"""Steps 3 to 10 never let the host wait for the GPU; torch itself tells.

tests/train/test_no_waits.py shows the same without a GPU.
"""

import pytest
import torch

from tests.gpu.device import DEVICE, REHEARSAL, on_device
from tests.train.test_no_waits import MODELS, make

pytestmark = [*on_device, pytest.mark.usefixtures("group_of_one")]


@pytest.mark.parametrize("accumulate", [1, 4])
@pytest.mark.parametrize("model", MODELS)
def test_steps_3_to_10_do_not_wait(model: str, accumulate: int) -> None:
    step, batch = make(model, accumulate, DEVICE)

    def train(number: int) -> None:
        step.health.begin(number, 8 * number, list)
        step(batch, 0.1)
        step.health.judge(late=True)
        assert not step.stop.agreed

    for number in (1, 2):
        train(number)
    if REHEARSAL:
        for number in range(3, 11):
            train(number)
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        for number in range(3, 11):
            train(number)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    # This mode does not see events. So the GPU sleeps for about a second: the host must have queued
    # a step, and have read the numbers of the step before, while it still sleeps.
    torch.cuda.synchronize()
    awake = torch.cuda.Event()
    torch.cuda._sleep(2_000_000_000)
    awake.record()
    train(11)
    assert not awake.query(), "the host has waited for the GPU"
    torch.cuda.synchronize()
    step.health.judge(late=False)
    assert step.totals.means()["loss"] > 0
