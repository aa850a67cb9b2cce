"""Optimizers of others: which a divided model may have, and that these train the same."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from hpctrain.config.schema import OptimizerConfig
from hpctrain.engine.building import build_optimizer as checked
from hpctrain.engine.checkpoint.checkpointer import Checkpointer
from hpctrain.errors import ConfigError
from tests.bounds import EXACT, within
from tests.parallel.parity import Cell, Cells, difference, reference
from tests.steps import ALONE, make
from tests.training import optimizers

WHOLE: dict[str, int] = {"dp_replicate": 4, "cp": 2}


@pytest.mark.parametrize(
    ("kind", "layout", "said"),
    [
        (torch.optim.AdamW, {"dp_shard": 2, "tp": 2}, ""),
        (torch.optim.Adafactor, WHOLE, ""),
        (torch.optim.Adafactor, {"dp_shard": 2}, r"\(dp_shard=2\), and it is not known .*=ddp"),
        (torch.optim.Adafactor, {"tp": 2, "dp_replicate": 2}, r"\(tp=2\), and it is not known"),
        (optimizers.Prodigy, {"pp": 2}, r"\(pp=2\), and it is not known"),
        (optimizers.Lion, {"ep": 2}, ""),  # it says that it is element-wise
        (optimizers.Around, WHOLE, "its attribute inner is an optimizer with a state of its own"),
        (torch.optim.LBFGS, WHOLE, "needs a closure that computes the loss again"),
    ],
)
def test_what_is_refused_before_the_first_step(
    kind: Any, layout: dict[str, int], said: str
) -> None:
    made = kind([torch.zeros(2, 2, requires_grad=True)], lr=0.1)
    model: Any = SimpleNamespace(layout=layout)
    if not said:
        return checked.check_optimizer("mine", made, model)
    with pytest.raises(ConfigError, match=f"optimizer._target_=mine.*{said}"):
        checked.check_optimizer("mine", made, model)


SGD = "torch.optim.SGD"


@pytest.mark.usefixtures("group_of_one")
@pytest.mark.parametrize(
    ("config", "parameters", "expected"),
    [
        (OptimizerConfig(), ["plain", "scalar"], True),
        (OptimizerConfig("torch.optim.Adam", options={"eps": 1e-6}), ["plain", "divided"], True),
        (OptimizerConfig(SGD, options={"momentum": 0.9}), ["plain"], True),
        (OptimizerConfig(SGD), ["plain", "divided"], False),  # torch raises
        (OptimizerConfig("torch.optim.RMSprop"), ["plain"], False),
        (OptimizerConfig("mine.AdamW"), ["plain"], False),
        (OptimizerConfig(options={"foreach": True}), ["plain"], False),
        (OptimizerConfig(options={"fused": False}), ["plain"], False),
        (OptimizerConfig(groups=[{"options": {"capturable": True}}]), ["plain"], False),
        (OptimizerConfig(), ["plain", "complex"], False),
        (OptimizerConfig(), ["plain", "elsewhere"], False),
        (OptimizerConfig(), [], False),
    ],
)
def test_who_is_fused(
    config: OptimizerConfig, parameters: list[str], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checked, "_FUSED_ON", "cpu")  # which stands for a GPU
    plain = torch.zeros(4, 2)
    kinds = {
        "plain": plain,
        "scalar": torch.zeros(()),
        "divided": distribute_tensor(plain, init_device_mesh("cpu", (1,)), [Shard(0)]),
        "complex": torch.zeros(2, dtype=torch.complex64),
        "elsewhere": torch.zeros(2, device="meta"),
    }
    assert checked.is_fused(config, [kinds[name] for name in parameters]) is expected


@pytest.mark.usefixtures("group_of_one")
def test_fused_kernels_are_for_gpus_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make().model
    chosen = OptimizerConfig(options={"fused": False})
    for on, config, expected in [
        ("cuda", OptimizerConfig(), None),
        ("cpu", OptimizerConfig(), True),
        ("cpu", chosen, False),
    ]:
        monkeypatch.setattr(checked, "_FUSED_ON", on)
        (group,) = checked.build_optimizer(config, model).param_groups
        assert group["fused"] is expected


@pytest.mark.usefixtures("group_of_one")
def test_a_state_that_no_checkpoint_can_hold_is_refused_before_the_first_step(
    tmp_path: Path,
) -> None:
    model = make().model
    saved = Checkpointer(tmp_path, 2, ALONE, model, optimizers.Extra(model.parameters, lr=0.1))
    with pytest.raises(ConfigError, match=r"state_dict\(\) also has 'slow'"):
        saved.prove()


LAYOUTS = {
    "zero1": {"parallel.dp_replicate": 1, "parallel.dp_shard": 2, "parallel.zero": 1},
    "tp": {"parallel.tp": 2},
}
LISTED = [f"torch.optim.{name}" for name in sorted(checked._ELEMENTWISE["torch"] - {"Muon"})]
TRAINED = [*LISTED, *(f"tests.training.optimizers.{name}" for name in ("Lion", "Early", "Fused"))]
CELLS = Cells(
    [],
    [
        Cell(
            "conv" if layout == "zero1" else "untied", 2, (*keys.items(),), optimizer=name, steps=3
        )
        for layout, keys in LAYOUTS.items()
        for name in TRAINED
        if (layout, name) != ("tp", "torch.optim.RMSprop")  # rounding: docs/reproducibility.md
    ],
)


@pytest.mark.parametrize("cell", CELLS.params, ids=lambda cell: f"{cell} {cell.optimizer}")
def test_what_is_listed_trains_the_same_where_ranks_divide_the_model(cell: Cell) -> None:
    expected = reference(cell.model, cell.optimizer, 3)
    within([difference(result, expected)[2] for result in CELLS[cell]], EXACT)
