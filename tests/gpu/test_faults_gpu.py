"""What kills and hangs do to a training of two ranks that share the GPU, with gloo between them."""

import json
from pathlib import Path

from tests.faults.disturbed import Training, wait_for
from tests.faults.suite import KILLS, Suite
from tests.gpu.device import DEVICE, on_gpu

pytestmark = on_gpu
SHARED = (f"parallel.device={DEVICE.type}", "parallel.backend=gloo")


def test_killed_ranks_go_on_bit_by_bit(digits: Path, tmp_path: Path) -> None:
    suite = Suite(tmp_path, digits, DEVICE.type)
    for seed, event in enumerate(KILLS):
        suite.disturb([event], seed)
    assert not suite.failed


def test_a_kernel_that_does_not_end_is_named(digits: Path, tmp_path: Path) -> None:
    keys = (*SHARED, "hang.floor_s=5", "parallel.timeout_s=20", "train.early_stopping.metric=null")
    training = Training(tmp_path, digits, keys, new=True)
    training.start()
    wait_for(lambda: training.at()[1] >= 20, "step 20")
    training.order(1, "spin")
    hang = wait_for(lambda: [*training.run.glob("**/hang*.json")], "a sentence")[0]
    said = json.loads(hang.read_text())
    print(said)
    assert "rank 1" in said["sentence"]
    assert training.wait() != 0
    training.order(1, "")
    training.start()
    assert training.wait() == 0
