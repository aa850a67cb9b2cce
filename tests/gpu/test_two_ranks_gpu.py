"""Two ranks on one GPU, over gloo: NCCL takes one rank for each GPU.

gloo copies through the CPU, so this shows that the numbers are right, and says nothing of speed.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import run_json, run_module, runs
from tests.gpu.device import DEVICE, on_device
from tests.gpu.test_gpu import SHORT, STEPS, losses, without_later_steps
from tests.job.test_train import LONG, opened, wait_for_step

pytestmark = on_device
TORCHRUN = ("--standalone", "--nproc-per-node=2", "-m", "hpctrain", "experiment=digits")
KINDS = ("none", "powersgd")


def train(device: str, digits: Path, folder: Path, *arguments: str) -> Path:
    """Train on two ranks; return the run directory."""
    where = (f"data.path={digits}", f"output_dir={folder}", f"parallel.device={device}")
    given = (*SHORT, *where, "parallel.backend=gloo", *arguments)
    run_module("torch.distributed.run", *TORCHRUN, *given, new=True)
    (run,) = runs(folder)
    assert run_json(run)["state"] == "finished"
    assert run_json(run)["attempts"][-1]["world_size"] == 2
    return run


@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_of_ddp_are_those_of_the_cpu(
    kind: str, digits: Path, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    compression = f"train.compression.kind={kind}"
    whole = train("cpu", digits, tmp_path / "cpu", compression)
    begun = without_later_steps(whole, 1, tmp_path / "gpu")
    resumed = train(DEVICE.type, digits, begun, compression)
    after = {key: (value, losses(whole)[key]) for key, value in losses(resumed, 2).items()}
    assert len(after) >= STEPS - 1
    worst = max(abs(one / other - 1) for one, other in after.values())
    record_property(f"{kind}_loss_difference", worst)
    # What is left out depends on rounding.
    assert worst < (1e-3 if kind == "none" else 3e-2)


def test_both_ranks_save_and_leave_when_one_gets_sigterm(digits: Path, tmp_path: Path) -> None:
    where = [f"data.path={digits}", f"output_dir={tmp_path}/runs", "tracking=off"]
    device = [f"parallel.device={DEVICE.type}", "parallel.backend=gloo"]
    long = ["train.max_epochs=5000", *LONG[1:]]
    command = [sys.executable, "-m", "torch.distributed.run", *TORCHRUN, *long, *where, *device]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    wait_for_step(tmp_path / "runs", 25, process)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    (second,) = (
        pid for pid in children if any(file.endswith(".rank1.log") for file in opened(pid))
    )
    os.kill(int(second), signal.SIGTERM)
    assert process.wait(120) == 1  # torchrun ends with 1, whatever the exit codes of its ranks
    (run,) = runs(tmp_path / "runs")
    attempt = run_json(run)["attempts"][-1]
    assert (run_json(run)["state"], attempt["reason"]) == ("interrupted", "SIGTERM")
    saved = max(int(path.name[5:]) for path in run.glob("checkpoints/step-????????"))
    assert saved == attempt["step"]
