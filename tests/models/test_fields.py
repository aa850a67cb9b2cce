"""Tests of the U-Net, on grids of one to three dimensions."""

import re
from typing import Any

import pytest
import torch

from hpctrain.config.composing.compose_sweep import Composer
from hpctrain.config.rules.combinations import parallel_problems
from hpctrain.config.rules.degrees import Degrees
from hpctrain.models import UNet
from tests.bounds import EXACT, within
from tests.parallel.parity import Cell, Cells, difference, reference
from tests.parallel.test_parity import OF_FOUR, ZERO


@pytest.mark.parametrize("grid", [(17,), (16, 12), (9, 8, 8)])
def test_shapes(grid: tuple[int, ...]) -> None:
    model = UNet(3, 2, [8, 16, 16], len(grid))
    assert model(torch.randn(2, 3, *grid)).shape == (2, 2, *grid)


def test_a_periodic_field_that_is_moved_gives_the_result_moved() -> None:
    torch.set_default_dtype(torch.float64)
    model = UNet(1, 1, [8], periodic=True)
    x = torch.randn(2, 1, 12, 16)
    moved = model(x.roll((5, 3), (2, 3)))
    assert torch.allclose(moved, model(x).roll((5, 3), (2, 3)), rtol=0, atol=EXACT)


def test_what_does_not_fit() -> None:
    makes: list[tuple[Any, str]] = [
        (lambda: UNet(1, 1, [12]), "widths=[12]: one or more multiples of 8"),
        (lambda: UNet(1, 1, dims=4), "dims=4: a grid has 1, 2 or 3"),
    ]
    for make, said in makes:
        with pytest.raises(ValueError, match=re.escape(said)):
            make()


FAST: dict[str, dict[str, Any]] = {
    "ddp": {"train.accumulate": 2},
    "zero3": ZERO[3] | {"train.activation_checkpointing": "full"},
}
SLOW: dict[str, dict[str, Any]] = {
    "zero1": ZERO[1],
    "zero2": ZERO[2] | {"train.accumulate": 2},
    "zero3, selective": ZERO[3] | {"train.activation_checkpointing": "selective"},
}


def cells(ranks: int, layouts: dict[str, dict[str, Any]]) -> list[Cell]:
    return [Cell("fields, unet", ranks, (*keys.items(),)) for keys in layouts.values()]


CELLS = Cells(cells(2, FAST), [*cells(2, SLOW), *cells(4, OF_FOUR)])


@pytest.mark.parametrize("cell", CELLS.params, ids=str)
def test_several_ranks_give_the_results_of_one(cell: Cell) -> None:
    for result in CELLS[cell]:
        within(difference(result, reference(cell.model)), EXACT)


def test_dividing_a_layer_or_the_layers_is_refused(composer: Composer) -> None:
    for degree in ("tp", "pp"):
        target = "hpctrain.models.UNet"
        given = ["experiment=digits", f"model._target_={target}", f"parallel.{degree}=2"]
        config = composer.typed(given)
        said = [*parallel_problems(config, Degrees.of(config.parallel, 2))]
        assert f"parallel.{degree}=2 with model._target_={target}" in "\n".join(said)
