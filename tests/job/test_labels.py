"""A label outside its range on one rank ends the run on all ranks, and the error names it."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from hpctrain.shards.format import write_shards
from tests.conftest import Completed, only_run, run_json

LAYOUTS = {
    "ddp": [],
    "zero3": ["parallel.dp_replicate=1", "parallel.dp_shard=2"],
    "pp": ["parallel.pp=2", "parallel.dp_replicate=1", "train.accumulate=2"],
}
PLAN = """\
from hpctrain.models import MLP
from hpctrain.models.plan import Plan
from torch import nn

class Net(nn.Module):
    plan = Plan(blocks="layers", last=("head",))

    def __init__(self, **_):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(2))
        self.head = nn.Linear(64, 10)

    def forward(self, image):
        x = image.flatten(1)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "label"), [("ddp", -100), ("zero3", 10), ("pp", -100)])
def test_a_label_on_one_rank_ends_all_ranks(
    layout: str, label: int, train: Callable[..., Completed], tmp_path: Path
) -> None:
    labels = np.arange(64) % 10
    labels[40] = label  # rank 1 of two has it
    images = np.ones((64, 1, 8, 8), np.float32)
    write_shards(tmp_path / "data", [("train", {"image": images, "label": labels})])
    (tmp_path / "net.py").write_text(PLAN)
    given = [f"data.path={tmp_path}/data", "data.shuffle=none", "data.val_split=null"]
    given += ["model._target_=net.Net", "metric=train/loss", "tracking.enabled=false"]
    mine = {"PYTHONPATH": str(tmp_path)}
    done = train(*given, *LAYOUTS[layout], ranks=2, code=1, **mine)
    text = f"task.target=label: row 8 of 32 is {label}, but the model returned 10 classes: labels "
    assert text in " ".join(done.stderr.split())
    assert f"task.ignore={label} leaves such labels out" in " ".join(done.stderr.split())
    run = only_run(tmp_path)
    assert run_json(run)["state"] == "failed"
    assert text in run_json(run)["attempts"][-1]["error"]
