"""MFU: the operations of a sample, and what a run logs of them."""

import logging
from functools import partial

import pytest
import torch
from torch import nn

from hpctrain.cluster.ranks.ranks import RankInfo
from hpctrain.config.composing.compose_sweep import Composer
from hpctrain.data.shards.types import Batch
from hpctrain.engine.building.instantiate import instantiate
from hpctrain.engine.parallel.precision import Precision
from hpctrain.insight.flops.flops import Utilisation, build_utilisation
from tests.steps import alone

DIGITS = {
    "image": torch.zeros(4, 1, 8, 8, dtype=torch.uint8),
    "label": torch.zeros(4, dtype=torch.int64),
    "mask": torch.ones(4, dtype=torch.bool),
}
PEAK = ("hardware=cpu", "hardware.peak_tflops={fp32: 2.0}")


def built(
    composer: Composer, *overrides: str, model: nn.Module | None = None, is_main: bool = True
) -> Utilisation | None:
    config = composer.typed([*PEAK, *overrides])
    spread = alone(model or nn.Linear(1, 1))
    spread.precision = Precision(config.precision, torch.device("cpu"))
    build = partial(instantiate, "model", config.model)
    rank = 0 if is_main else 1
    ranks = RankInfo("test", rank, rank, 0, 4, 4, 1, "localhost", 1)
    task = instantiate("task", config.task)
    return build_utilisation(build, spread, task, config.hardware, ranks)


def at_thousand(composer: Composer, batch: Batch, *overrides: str) -> dict[str, float]:
    """Return the metrics at 1,000 samples per second on four devices of 2 TFLOP/s."""
    made = built(composer, *overrides)
    assert made is not None
    before = torch.get_rng_state()
    made.begin(batch)
    assert torch.equal(torch.get_rng_state(), before)
    assert not made.due
    return made.metrics(1000.0)


@pytest.mark.usefixtures("group_of_one")
def test_an_mlp_needs_the_products_of_its_matrices(composer: Composer) -> None:
    found = at_thousand(composer, DIGITS, "experiment=digits")
    model = instantiate("model", composer.typed(["experiment=digits"]).model)
    sizes = [p.numel() for p in model.parameters() if p.dim() == 2]
    # Three products for each matrix, but no gradient of the images.
    flops = 6 * sum(sizes) - 2 * sizes[0]
    assert found["perf/mfu_percent"] == pytest.approx(100 * flops * 1000 / 8e12)


@pytest.mark.usefixtures("group_of_one")
def test_what_is_not_known_has_no_mfu(composer: Composer, caplog: pytest.LogCaptureFixture) -> None:
    digits = "experiment=digits"
    assert built(composer, digits, is_main=False) is None
    assert built(composer, digits, "precision.compute=bf16") is None
    # Figures of a GPU are those of a plan where a CPU trains.
    assert built(composer, digits, "hardware=h100_sxm") is None
    with caplog.at_level(logging.INFO):
        part = nn.Linear(1, 1).requires_grad_(False)
        assert built(composer, digits, model=part) is None
        assert "parameters that are not trained" in caplog.text
        bad = built(composer, digits, "model._target_=torch.nn.Identity")
        assert bad is not None
        bad.begin(DIGITS)
        assert bad.metrics(1.0) == {}
        assert "no MFU: the FLOPs of this model cannot be counted" in caplog.text


def test_more_than_all_is_an_error_that_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    made = Utilisation(lambda batch: 20, peak=1000.0)
    assert made.metrics(1.0) == {}  # nothing is counted yet
    made.begin(DIGITS)
    made.see(DIGITS)
    assert made.metrics(20.0) == {"perf/mfu_percent": 40}
    assert made.metrics(51.0) == made.metrics(51.0) == {}
    (error,) = [r.getMessage() for r in caplog.records if r.levelno == logging.ERROR]
    assert error.startswith("MFU would be 102%, more than the devices can do")
    made.see({name: value[:, None] for name, value in DIGITS.items()})  # other shapes
    assert made.metrics(20.0) == {}
