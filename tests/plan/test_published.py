"""The speeds and memory of published runs, and the errors that docs/published.md states."""

import pytest

from hpctrain.config.rules.degrees import Degrees
from hpctrain.config.schema import Config
from hpctrain.insight.plan.layouts import Layout
from hpctrain.insight.plan.memory import memory_of
from hpctrain.insight.plan.model_sizes import ModelSizes
from hpctrain.insight.plan.predicting import accuracy
from tests.plan.published import SOURCES, runs
from tests.plan.published_page import (
    APART,
    LISTS,
    MEMORY,
    PAGE,
    ROWS,
    errors_by_gpu,
    memory_row,
    named_class,
    named_memory,
    of_rows,
    page,
    rows_page,
    speed_row,
    tables,
)

FOUND = tables(ROWS.read_text())


def test_the_page_and_the_product_state_the_errors_of_the_rows() -> None:
    assert page(FOUND) == PAGE.read_text()
    assert rows_page(FOUND) == ROWS.read_text()
    judged = {name: of for name, rows in FOUND.items() if (of := of_rows(rows))}
    assert judged.pop(MEMORY) == accuracy.MEMORY
    apart = {APART, *LISTS.values()}
    assert {name: judged[name] for name in judged if name not in apart} == accuracy.SPEED
    assert errors_by_gpu(FOUND) == accuracy.BY_GPU


def test_layouts_without_a_mark_have_what_published_runs_of_referees_had() -> None:
    found = [
        accuracy.parts_of(Layout(run.config, run.config.launch.nodes, ()))
        for run in runs()
        # Those without flash attention count here: their layouts are the same.
        if not (run.refused or run.apart not in ("", "old") or run.calibrates)
    ]
    assert {kind for kinds, _ in found for kind in kinds} >= accuracy.COMPARED
    assert {together for _, together in found} >= accuracy.TOGETHER


def test_each_source_is_on_one_side_and_named_with_its_place() -> None:
    assert {run.source for run in runs()} == set(SOURCES)
    for source in SOURCES.values():
        assert source.url.startswith(("github.com/", "arxiv.org/"))
        assert source.date[:2] == "20"


@pytest.mark.slow
@pytest.mark.parametrize("model", sorted({run.model for run in runs()}))
def test_the_code_gives_these_predictions(model: str) -> None:
    for run in runs():
        if run.model == model and run.speed:
            assert speed_row(run) in FOUND[named_class(run)]
        if run.model == model and run.gib:
            assert memory_row(run) in FOUND[named_memory(run)]


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
    sizes = ModelSizes((((layer,),),), ((count - layer,),))
    found = memory_of(sizes, Degrees(dp_shard=8), config)
    states = found.parameters + found.gradients + found.optimizer
    assert states == 16 * count // 8
    if zero == 2:
        assert found.gathered == 2 * count
        total = states + found.gathered + 2 * count
    else:
        total = states + 2 * count // 8 + 4 * layer
    assert total / 2**30 == pytest.approx(published, abs=0.01)
