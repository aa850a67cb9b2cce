"""Two runs in one process: what the second saves in the background is its state, too.

The memory of its copy often has the address of the first one's, which CUDA has to forget before.
"""

from collections.abc import Callable
from pathlib import Path

import torch

from hpctrain.config.schema import ParallelConfig
from hpctrain.data import generators
from hpctrain.engine.checkpoint.checkpointer import Checkpointer
from hpctrain.engine.distributed.group import process_group
from hpctrain.models import MLP
from hpctrain.tasks import Classification
from tests.gpu.device import DEVICE, REHEARSAL, on_device
from tests.steps import ALONE, alone, batch, here, step_of

pytestmark = on_device
WIDTH = 64 if REHEARSAL else 1024


def test_the_checkpoints_of_both_are_those_of_saves_that_are_waited_for(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    for number in (1, 2):
        with process_group(ALONE, ParallelConfig(device=DEVICE.type)):
            saved_alike(tmp_path / str(number), record_property)


def saved_alike(folder: Path, record_property: Callable[[str, object], None]) -> None:
    model = alone(MLP(64, [WIDTH] * 12, 10), device=DEVICE)
    step = step_of(model, Classification(), torch.optim.AdamW(model.parameters, lr=1e-3))
    samples = {name: values.to(DEVICE) for name, values in batch(64).items()}
    for _ in range(3):
        step(samples, 1e-3)
    saved = Checkpointer(folder, 2, here(), model, step.optimizer)
    saved.saves.start_writers(16 << 30)
    step.exchange.asking.append(saved.saves)
    writer, states = saved.saves.writer, generators.states()
    assert writer is not None
    assert saved.save(1, {})
    saved.path(1).rename(folder / "waited")
    generators.restore(states)
    assert saved.save(1, {}, background=True)
    record_property(f"{folder.name}: pinned", float(writer._memory.is_pinned))
    record_property(f"{folder.name}: bytes", writer.nbytes)
    assert writer._said == "", "it was not in the background"
    while saved.saves.under_way:
        step(samples, 1e-3)
        saved.saves.advance()
    saved.saves.close()
    assert not writer._memory.is_pinned
    files = {file.name: file.read_bytes() for file in saved.path(1).glob("*.distcp")}
    assert files == {file.name: file.read_bytes() for file in (folder / "waited").glob("*.distcp")}
    assert files
