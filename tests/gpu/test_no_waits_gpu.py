"""Steps 9 to 16 never let the host wait for the GPU; torch itself tells.

In the first eight batches the host looks at the labels (hpctrain/tasks/labels.py).
tests/training/test_no_waits.py shows the same without a GPU.
"""

import pytest
import torch

from hpctrain.errors import HealthError
from tests.gpu.device import DEVICE, REHEARSAL, on_device
from tests.steps import stop_of
from tests.training.test_no_waits import MODELS, make

pytestmark = [*on_device, pytest.mark.usefixtures("group_of_one")]


@pytest.mark.parametrize("accumulate", [1, 4])
@pytest.mark.parametrize("model", MODELS)
def test_steps_9_to_16_do_not_wait(model: str, accumulate: int) -> None:
    step, batch = make(model, accumulate, DEVICE)

    def train(number: int) -> None:
        step.health.begin(number, 8 * number, list)
        step(batch, 0.1)
        step.health.judge(late=True)
        assert not stop_of(step).agreed

    for number in range(1, 9):
        train(number)
    if REHEARSAL:
        for number in range(9, 17):
            train(number)
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        for number in range(9, 17):
            train(number)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    if accumulate > 1:
        return  # the queue of a GPU holds about a thousand kernels, fewer than such a step has
    # This mode does not see events. So the GPU sleeps for about a second: the host must have queued
    # a step, and have read the numbers of the step before, while it still sleeps.
    torch.cuda.synchronize()
    awake = torch.cuda.Event()
    torch.cuda._sleep(2_000_000_000)
    awake.record()
    train(17)
    assert not awake.query(), "the host has waited for the GPU"
    torch.cuda.synchronize()
    step.health.judge(late=False)
    assert step.totals.means()["loss"] > 0


@pytest.mark.parametrize("late", [True, False])
def test_a_nan_is_told_after_the_next_step_or_before_what_lasts(late: bool) -> None:
    step, batch = make("images", 1, DEVICE)

    def train(number: int) -> None:
        step.health.begin(number, 8 * number, list)
        step(batch, 0.1)
        step.health.judge(late=late)

    train(1)
    hook = step.model.module.register_forward_hook(lambda *given: given[2] * float("nan"))
    if late and not REHEARSAL:
        train(2)
        hook.remove()
        with pytest.raises(HealthError, match="loss is not finite since step 2 "):
            train(3)
    else:
        with pytest.raises(HealthError, match="loss is not finite since step 2 "):
            train(2)
