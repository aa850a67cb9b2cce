"""The trainer's collaborators, one by one, in a process group of one."""

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch import nn

from hpctrain.distributed.group import process_group
from hpctrain.distributed.slurm import RankInfo
from hpctrain.errors import ConfigError, StorageError
from hpctrain.models import MLP
from hpctrain.schema import ParallelConfig, SchedulerConfig
from hpctrain.tasks import Classification
from hpctrain.train.checkpoint import Checkpointer, verify
from hpctrain.train.schedule import Schedule
from hpctrain.train.step import Precision, Totals, TrainStep
from hpctrain.train.stop import Stop

ALONE = RankInfo.from_env({"HPCTRAIN_LAUNCHER": "single"})


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    with process_group(ALONE, ParallelConfig(device="cpu")):
        yield


def batch(size: int, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "image": torch.randint(0, 16, (size, 1, 8, 8), generator=generator, dtype=torch.uint8),
        "label": torch.randint(0, 10, (size,), generator=generator),
        "mask": torch.ones(size, dtype=torch.bool),
    }


def make(accumulate: int = 1, clip_norm: float | None = None, dropout: float = 0.0) -> TrainStep:
    torch.manual_seed(0)
    model = MLP(64, [16], 10, dropout)
    return TrainStep(
        model,
        Classification(),
        torch.optim.AdamW(model.parameters(), lr=1e-3),
        Precision("fp32", torch.device("cpu")),
        accumulate=accumulate,
        clip_norm=clip_norm,
        stop=Stop(),
    )


def weights(step: TrainStep) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in step.model.parameters()])


def test_accumulation_changes_nothing() -> None:
    whole, parts = make(), make(accumulate=4)
    for seed in range(3):
        whole(batch(32, seed), 1e-2)
        parts(batch(32, seed), 1e-2)
    assert torch.allclose(weights(whole), weights(parts), atol=1e-6)
    one, four = whole.totals.means(), parts.totals.means()
    assert one == pytest.approx(four, rel=1e-6)


def test_masked_rows_count_nothing() -> None:
    full, padded = make(), make()
    real = batch(24)
    filled = {name: torch.cat([values, values[:8]]) for name, values in real.items()}
    filled["mask"][24:] = False
    full(real, 1e-2)
    padded(filled, 1e-2)
    assert torch.allclose(weights(full), weights(padded), atol=1e-7)
    assert full.totals.means() == pytest.approx(padded.totals.means(), rel=1e-6)


def test_clipping_is_of_the_global_norm() -> None:
    step = make(clip_norm=0.01)
    step.optimizer = torch.optim.SGD(step.model.parameters(), lr=1.0)
    before = weights(step)
    step(batch(32), 1.0)
    assert (weights(step) - before).norm().item() == pytest.approx(0.01, rel=1e-3)


def test_totals_resume_in_the_middle() -> None:
    totals, again = Totals(), Totals()
    totals.add(["loss"], torch.tensor([3.0, 2.0], dtype=torch.float64))
    again.load_state_dict(totals.state_dict(), torch.device("cpu"))
    for half in (totals, again):
        half.add(["loss"], torch.tensor([1.0, 2.0], dtype=torch.float64))
    assert totals.means() == again.means() == {"loss": 1.0}
    assert totals.means() == {}


def test_schedule() -> None:
    cosine = Schedule(2.0, SchedulerConfig("cosine", warmup_steps=4, final_ratio=0.1), 104)
    assert [cosine(step) for step in range(4)] == [0.5, 1.0, 1.5, 2.0]
    assert cosine(4) == 2.0
    assert cosine(54) == pytest.approx(1.1)
    assert cosine(104) == cosine(1000) == pytest.approx(0.2)
    assert Schedule(2.0, SchedulerConfig("constant"), 10)(9) == 2.0
    assert Schedule(2.0, SchedulerConfig("linear"), 10)(5) == 1.0


def test_a_field_that_is_not_there_is_named() -> None:
    with pytest.raises(ConfigError, match=r"task\.target=class: .* are image, label"):
        Classification(target="class")(MLP(64, [], 10), batch(2))


def checkpointer(folder: Path, step: TrainStep) -> Checkpointer:
    return Checkpointer(folder, 2, ALONE, step.model, step.optimizer)


def test_saved_and_loaded_twice_goes_on_the_same(tmp_path: Path) -> None:
    """Twice, for a second resume has been wrong upstream (pytorch #138575)."""
    step = make(dropout=0.5)
    saved = checkpointer(tmp_path, step)
    for number in range(1, 7):
        if number in (3, 5):
            saved.save(number, {"step": number})
            torch.manual_seed(number)  # what follows must come from the checkpoint
            step = make(dropout=0.5)
            saved = checkpointer(tmp_path, step)
            assert saved.load_latest() == {"step": number}
        step(batch(16, number), 1e-2)
    torch.manual_seed(0)
    undisturbed = make(dropout=0.5)
    for number in range(1, 7):
        undisturbed(batch(16, number), 1e-2)
    assert torch.equal(weights(step), weights(undisturbed))


def test_only_the_newest_stay_and_an_unfinished_one_is_none(tmp_path: Path) -> None:
    step = make()
    step(batch(8), 1e-2)
    saved = checkpointer(tmp_path, step)
    assert saved.load_latest() is None
    for number in (1, 2, 3):
        saved.save(number, {"step": number})
    (tmp_path / "step-00000009.tmp").mkdir()
    assert sorted(path.name for path in tmp_path.glob("step-????????")) == [
        "step-00000002",
        "step-00000003",
    ]
    assert saved.load_latest() == {"step": 3}


@pytest.mark.parametrize("damage", ["bit", "truncated", "missing", "manifest"])
def test_a_damaged_checkpoint_is_passed_over(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    step = make()
    step(batch(8), 1e-2)
    saved = checkpointer(tmp_path, step)
    for number in (1, 2):
        saved.save(number, {"step": number})
    newest = tmp_path / "step-00000002"
    (data,) = newest.glob("*.distcp")
    content = bytearray(data.read_bytes())
    if damage == "bit":
        content[len(content) // 2] ^= 1
        data.write_bytes(content)
    elif damage == "truncated":
        os.truncate(data, len(content) - 1)
    elif damage == "missing":
        data.unlink()
    else:
        (newest / "manifest.json").write_text("{")
    assert verify(newest)
    with caplog.at_level(logging.WARNING):
        assert saved.load_latest() == {"step": 1}
    assert "step-00000002 is not intact" in caplog.text
    # It can be saved again, in its place.
    saved.save(2, {"step": 2})
    assert saved.load_latest() == {"step": 2}
    for path in tmp_path.glob("*/manifest.json"):
        path.unlink()
    with pytest.raises(StorageError, match="no checkpoint is intact"):
        saved.load_latest()


def test_a_checkpoint_that_cannot_be_written_is_a_storage_error(tmp_path: Path) -> None:
    step = make()
    step(batch(8), 1e-2)
    folder = tmp_path / "checkpoints"
    saved = checkpointer(folder, step)
    folder.write_text("not a folder")
    with pytest.raises(StorageError, match="the checkpoint was not written"):
        saved.save(1, {})


def test_a_signal_sets_its_flag_and_the_ranks_agree() -> None:
    with Stop() as stop:
        os.kill(os.getpid(), signal.SIGUSR2)
        end = time.monotonic() + 5
        while not stop.asked and time.monotonic() < end:
            time.sleep(0.01)
        assert (stop.asked, stop.flags()) == ("SIGUSR2", [0.0, 0.0, 0.0, 1.0])
        assert (stop.agreed, stop.reason) == (False, "")  # not before the ranks have
        stop.offer(torch.tensor([0.0, 0.0, 1.0, 3.0]))  # of four ranks, one heard another first
        assert (stop.agreed, stop.reason) == (True, "SIGTERM")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_signal_is_seen_while_the_main_thread_is_blocked() -> None:
    """A Python handler would wait for the collective's end; the flag does not."""
    seen: list[str] = []

    def watch() -> None:
        threading.Event().wait(0.5)
        os.kill(os.getpid(), signal.SIGTERM)
        threading.Event().wait(0.5)
        seen.append(stop.asked)

    with Stop() as stop:
        watcher = threading.Thread(target=watch)
        watcher.start()
        # Blocks outside Python, as a rank whose peer is late; the watcher has long finished.
        store = torch.distributed.HashStore()
        with pytest.raises(RuntimeError):
            store.wait(["a key that nobody sets"], timedelta(seconds=2))
        watcher.join()
    assert seen == ["SIGTERM"]


def test_a_second_ctrl_c_ends_at_once() -> None:
    program = (
        "import os, signal, time; from hpctrain.train.stop import Stop\n"
        "with Stop() as stop:\n"
        "    for _ in range(2):\n"
        "        os.kill(os.getpid(), signal.SIGINT); time.sleep(1)\n"
        "        print(stop.asked, flush=True)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (130, "SIGINT\n")


def test_bf16_computes_in_bf16_and_keeps_fp32_parameters() -> None:
    model = nn.Linear(4, 4)
    with Precision("bf16", torch.device("cpu"))():
        assert model(torch.ones(1, 4)).dtype == torch.bfloat16
    assert model.weight.dtype == torch.float32
