"""The speeds of published runs, and the errors that docs/plan.md states."""

import re
from statistics import mean

import pytest

from hpctrain.config.rules.degrees import Degrees
from hpctrain.config.schema import Config
from hpctrain.plan.memory import memory_of
from hpctrain.plan.model_sizes import ModelSizes
from tests.conftest import ROOT
from tests.plan.published import RUNS, beginning, of_megatron, row

DOCS = (ROOT / "docs" / "plan.md").read_text()
HELD = [run for run in RUNS if not run.calibrates]
_ERROR = re.compile(r"([+-][0-9.]+) % \|$")


def _line(text: str) -> str:
    return next(line for line in DOCS.splitlines() if line.startswith(text))


def test_the_errors_that_the_documentation_states() -> None:
    errors = []
    for run in [*RUNS, *of_megatron()]:
        found = _ERROR.search(_line(beginning(run)))
        assert found, run
        if run in HELD:
            errors.append(abs(float(found[1])))
    assert len(errors) >= 30
    assert mean(errors) <= 15
    assert f"the mean error of these {len(errors)} is {mean(errors):.1f} %" in DOCS


@pytest.mark.slow
@pytest.mark.parametrize("model", sorted({run.model for run in [*RUNS, *of_megatron()]}))
def test_the_code_gives_these_predictions(model: str) -> None:
    for run in [*RUNS, *of_megatron()]:
        if run.model == model:
            assert _line(beginning(run)) == row(run)


@pytest.mark.parametrize(("zero", "published"), [(2, 15.93), (3, 6.10)], ids=["ZeRO-2", "ZeRO-3"])
def test_the_rows_of_deepspeeds_estimators(zero: int, published: float) -> None:
    """DeepSpeed's documentation: 2,851 million parameters, 8 GPUs, GiB for each without offload.

    It counts 16 bytes of a parameter that are divided, as we do, and 2 of a 16-bit copy. With
    ZeRO-2 the copy is whole, and so are 2 bytes of 16-bit gradients, which we divide at once. With
    ZeRO-3 the copy is divided, and the largest layer, of 32 million, is there with its gradient.
    """
    count, layer = 2_851_000_000, 32_000_000
    config = Config()
    config.parallel.zero, config.precision.compute = zero, "bf16"
    sizes = ModelSizes.counted(layer, 1, count - layer)
    found = memory_of(
        *(sizes, Degrees(dp_shard=8), config.parallel, config.precision, config.optimizer)
    )
    assert found.states == 16 * count // 8
    if zero == 2:
        assert found.gathered == 2 * count
        total = found.states + found.gathered + 2 * count
    else:
        total = found.states + 2 * count // 8 + 4 * layer
    assert total / 2**30 == pytest.approx(published, abs=0.01)
