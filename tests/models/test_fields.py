"""Tests of the models of fields: U-Net and FNO, on grids of one to three dimensions."""

import re
from typing import Any

import pytest
import torch

from hpctrain.config.composing.compose_sweep import Composer
from hpctrain.config.rules.combinations import own_model_problems
from hpctrain.config.rules.degrees import Degrees
from hpctrain.errors import ConfigError
from hpctrain.models import FNO, UNet
from hpctrain.models.fno import _SpectralConvolution
from tests.bounds import EXACT, within
from tests.parallel.parity import Cell, Cells, difference, reference
from tests.parallel.test_parity import OF_FOUR, ZERO


@pytest.mark.parametrize("grid", [(17,), (16, 12), (9, 8, 8)])
def test_shapes(grid: tuple[int, ...]) -> None:
    x = torch.randn(2, 3, *grid)
    modes = [3] * len(grid)
    for model in (
        UNet(3, 2, [8, 16, 16], len(grid)),
        FNO(3, 2, modes, 8, 2),
        FNO(3, 2, modes, 8, 2, positions=True),
    ):
        assert model(x).shape == (2, 2, *grid)


@pytest.mark.parametrize("name", ["unet", "fno"])
def test_a_periodic_field_that_is_moved_gives_the_result_moved(name: str) -> None:
    torch.set_default_dtype(torch.float64)
    model = UNet(1, 1, [8], periodic=True) if name == "unet" else FNO(1, 1, [3, 3], 8)
    x = torch.randn(2, 1, 12, 16)
    moved = model(x.roll((5, 3), (2, 3)))
    assert torch.allclose(moved, model(x).roll((5, 3), (2, 3)), rtol=0, atol=EXACT)


def test_the_spectral_convolution_is_that_of_li_et_al() -> None:
    """Each kept mode is multiplied by its matrix, and all others become zero."""
    torch.set_default_dtype(torch.float64)
    layer, x = _SpectralConvolution(3, [2, 4]), torch.randn(5, 3, 8, 10)
    weight, waves = torch.view_as_complex(layer.weight), torch.fft.fft2(x)
    found = torch.fft.fft2(layer(x))
    for ky, kx in ((0, 1), (1, 3), (-1, 2), (-2, 1)):
        matrix = weight[0, :, :, ky, kx] if ky >= 0 else weight[1, :, :, ky + 2, kx]
        expected = waves[:, :, ky, kx] @ matrix
        assert torch.allclose(found[:, :, ky, kx], expected, rtol=0, atol=EXACT)
    within([found[:, :, ky, kx].abs().max().item() for ky, kx in ((2, 1), (1, 4))], EXACT)


def test_a_trained_operator_takes_a_finer_grid() -> None:
    """A smooth field on twice the points gives the same values at the points of both grids."""
    model = FNO(1, 1, [3, 3], 8, 2)
    angle = torch.arange(32) * 2 * torch.pi / 32
    x = (angle.sin()[:, None] + (2 * angle).cos()[None]).expand(1, 1, 32, 32)
    coarse = model(x[..., ::2, ::2]).detach()
    assert torch.allclose(model(x)[..., ::2, ::2], coarse, atol=1e-2 * float(coarse.abs().max()))


def test_bf16_computes_the_transform_in_float32() -> None:
    model, x = FNO(1, 1, [4, 4], 16, 2), torch.randn(2, 1, 16, 12)  # no powers of two
    exact = model(x)
    with torch.autocast("cpu", torch.bfloat16):
        assert model.layers[0].spectral(x.expand(-1, 16, -1, -1).bfloat16()).dtype == torch.float32
        rough = model(x)
    assert (rough.float() - exact).norm() < 0.02 * exact.norm()
    pure = model.bfloat16()(x.bfloat16())
    assert (pure.float() - exact).norm() < 0.05 * exact.norm()


def test_what_does_not_fit() -> None:
    makes: list[tuple[Any, str]] = [
        (lambda: UNet(1, 1, [12]), "widths=[12]: one or more multiples of 8"),
        (lambda: UNet(1, 1, dims=4), "dims=4: a grid has 1, 2 or 3"),
        (lambda: FNO(1, 1, []), "modes=[]"),
        (lambda: FNO(1, 1, [2], layers=0), "layers=0"),
    ]
    for make, said in makes:
        with pytest.raises(ValueError, match=re.escape(said)):
            make()
    with pytest.raises(ConfigError, match=re.escape("which has [4, 6] modes")):
        FNO(1, 1, [5, 3], 8, 1)(torch.zeros(1, 1, 8, 10))


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
    models = ("fields, unet", "fields, fno")
    return [Cell(model, ranks, (*keys.items(),)) for model in models for keys in layouts.values()]


CELLS = Cells(cells(2, FAST), [*cells(2, SLOW), *cells(4, OF_FOUR)])


@pytest.mark.parametrize("cell", CELLS.params, ids=str)
def test_several_ranks_give_the_results_of_one(cell: Cell) -> None:
    for result in CELLS[cell]:
        within(difference(result, reference(cell.model)), EXACT)


def test_dividing_a_layer_or_the_layers_is_refused(composer: Composer) -> None:
    for name in ("UNet", "FNO"):
        for degree in ("tp", "pp"):
            config = composer.typed(
                [
                    "experiment=digits",
                    f"model._target_=hpctrain.models.{name}",
                    f"parallel.{degree}=2",
                ]
            )
            said = [*own_model_problems(config, Degrees.of(config.parallel, 2))]
            assert f"parallel.{degree}=2: hpctrain.models.{name} has no plan for" in said[0]
