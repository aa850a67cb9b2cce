"""What one of up to 4,096 ranks holds of a Llama 3 model, also during the initialisation."""

import functools
import json
import os
import sys
import time
from typing import Any

import pytest
import torch
from torch import nn

from hpctrain.config.schema import Config, ParallelConfig
from tests import forkserver
from tests.conftest import ROOT
from tests.parallel.live import Live
from tests.parallel.parity import spread
from tests.ranks import run_ranks

Cell = tuple[str, int, str]
SIZES = {"llama3_8b": 8_030_261_248, "llama3_70b": 70_553_706_496, "llama3_405b": 405_853_388_800}
# The number of layers, and the parameters of each.
DEPTHS = {
    "llama3_8b": (32, 218_112_000),
    "llama3_70b": (80, 855_654_400),
    "llama3_405b": (126, 3_187_703_808),
}
# FSDP2 lists the parts of each parameter for all ranks. So the time grows with the number of
# parameters and with the number of ranks that divide the model.
# All layers are alike: these have the first two only, and all of them among the slow ones.
SHALLOW: list[Cell] = [("llama3_8b", 4096, "zero3"), ("llama3_405b", 4096, "hsdp")]
SLOW: list[Cell] = [
    (model, world, strategy)
    for model in SIZES
    for world in (8, 64, 512, 4096)
    for strategy in ("zero1", "zero2", "zero3", "hsdp")
    # The stages differ only when the model is trained.
    if (world < 4096 or strategy in ("zero3", "hsdp"))
]
MOST_RSS = 1.5 * 2**30  # the parameters of the 405B model are 1,512 GiB
TIED = ("llama3_8b", 64, "zero3", 0, {"tied": True, "layers": 2})
LAST = ("llama3_8b", 512, "zero3", 511, {"layers": 2})
PLACES = [
    (strategy, rank, world)
    for world in (8, 64, 512, 4096)
    for strategy in ("zero3", "hsdp")
    for rank in sorted({0, 1, 7, world // 2, world - 1})
]


def simulated(cells: list[Any], places: list[Any]) -> dict[str, Any]:
    """Return the answers of a separate process, which holds nothing of other tests."""
    asked = json.dumps({"cells": cells, "places": places})
    done = forkserver.run(
        [sys.executable, "-m", "tests.parallel.scale", asked],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=dict(os.environ),
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


# Llama 3 405B was trained in this shape (Grattafiori et al. 2024, table 4): here with dp_shard 8.
ALL = ("llama3_405b", 16384, "zero3+tp8+cp16+pp16")
OTHERS: list[tuple[str, int, str, int, dict[str, Any]]] = [
    ("llama3_70b", 512, "hsdp+tp8", 0, {"layers": 2}),
    (*ALL, 5 * 1024 + 77, {}),
]
ENDS: list[tuple[str, int, str, int, dict[str, Any]]] = [
    (*ALL, rank, {}) for rank in (0, 15 * 1024 + 5)
]


@functools.cache
def answers() -> dict[Any, dict[str, Any]]:
    """Return the reports by cell, and the places by strategy, rank and world."""
    shallow = [(*cell, 0, {"layers": 2}) for cell in SHALLOW]
    cells = [*shallow, TIED, LAST, *OTHERS]
    found = simulated(cells, PLACES)
    keys = [*SHALLOW, "tied", "last", *(cell[:4] for cell in OTHERS), *PLACES]
    return dict(zip(keys, found["reports"] + found["places"], strict=True))


def size_of(model: str, layers: int | None) -> int:
    """Return the number of parameters of a model with its first `layers` layers, or with all."""
    depth, size = DEPTHS[model]
    return SIZES[model] - (depth - (depth if layers is None else layers)) * size


def check(cell: Cell, report: dict[str, Any], size: int) -> None:
    _, world, strategy = cell
    ranks = 8 if strategy == "hsdp" else world
    assert report["parameters"] == size
    assert report["whole"] == []
    assert report["too_large"] == []
    for kind in ("parameters", "gradients", "optimizer"):
        local, formula = report[f"local_{kind}"], report[f"formula_{kind}"]
        assert local == pytest.approx(formula, rel=0.01), kind
    # The paper's formula does not know rows: it holds while a parameter has a row for each rank.
    if ranks <= 1024:
        assert report["local_parameters"] == pytest.approx(4 * size / ranks, rel=0.01)
        assert report["local_optimizer"] == pytest.approx(8 * size / ranks, rel=0.01)
    assert report["max_rss"] < MOST_RSS


@pytest.mark.slow
@pytest.mark.parametrize("cell", SHALLOW, ids=lambda cell: "-".join(map(str, cell)))
def test_each_rank_holds_its_part_of_two_layers(cell: Cell) -> None:
    check(cell, answers()[cell], size_of(cell[0], 2))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("cell", SLOW, ids=lambda cell: "-".join(map(str, cell)))
def test_each_rank_holds_its_part_of_more(cell: Cell) -> None:
    check(cell, simulated([(*cell, 0, {})], [])["reports"][0], SIZES[cell[0]])


@pytest.mark.slow
def test_the_last_rank_holds_no_more_than_the_first() -> None:
    last = answers()["last"]
    assert last["too_large"] == []
    assert last["local_parameters"] <= last["formula_parameters"]
    assert last["local_optimizer"] <= last["formula_optimizer"]


@pytest.mark.slow
@pytest.mark.parametrize("cell", OTHERS, ids=lambda cell: "-".join(map(str, cell[:4])))
def test_every_degree_divides(cell: tuple[Any, ...]) -> None:
    check_degrees(cell[2], answers()[cell[:4]], size_of(cell[0], cell[4].get("layers")))


@pytest.mark.slow
@pytest.mark.parametrize("cell", [OTHERS[0], *ENDS], ids=lambda cell: "-".join(map(str, cell[:4])))
def test_every_degree_divides_all_layers(cell: tuple[Any, ...]) -> None:
    model, world, strategy, rank, _ = cell
    report = simulated([(model, world, strategy, rank, {})], [])["reports"][0]
    check_degrees(strategy, report, SIZES[model])


def check_degrees(strategy: str, report: dict[str, Any], size: int) -> None:
    assert report["whole"] == []
    assert report["too_large"] == []
    for kind in ("parameters", "gradients", "optimizer"):
        # A pipeline's gradients wait whole for the last micro-batch, and are divided afterwards.
        waited = kind == "gradients" and "pp" in strategy
        formula = report["formula_parameters" if waited else f"formula_{kind}"]
        assert report[f"local_{kind}"] == pytest.approx(formula, rel=0.01), kind
    assert report["max_rss"] < MOST_RSS
    if "pp" not in strategy:
        assert report["parameters"] == size
    else:  # each stage has 7 to 8 of the 126 layers, of 3.19 billion parameters each
        assert 7 <= report["parameters"] / 3_187_703_808 < 9
        assert report["local_parameters"] == pytest.approx(
            4 * report["parameters"] / (8 * 16 * 8), rel=0.01
        )


@pytest.mark.slow
def test_tied_embeddings_count_once() -> None:
    tied = answers()["tied"]
    assert tied["parameters"] == size_of("llama3_8b", 2) - 128_256 * 4096
    assert tied["shared"] == 1
    assert tied["local_parameters"] == pytest.approx(tied["formula_parameters"], rel=0.01)


@pytest.mark.slow
def test_places_in_the_mesh() -> None:
    for asked in PLACES:
        (strategy, rank, world), place = asked, answers()[asked]
        assert (place["rank"], place["dp_rank"], place["dp_size"]) == (rank, rank, world)
        if strategy == "hsdp" and world > 8:
            node, within = divmod(rank, 8)
            assert place["names"] == ["dp_replicate", "dp_shard"]
            assert place["shape"] == [world // 8, 8]
            assert place["coordinate"] == [node, within]
            # The ranks of a node divide a replica among them.
            assert place["shard_neighbours"] == [8 * node + i for i in range(8)]
        else:
            assert place["names"] == ["dp_shard"]
            assert place["shape"] == [world]
            assert place["coordinate"] == [rank]
            assert place["shard_neighbours"] == list(range(world))


# The other tests do not train either: they build small models on two real ranks.

WIDTH, LAYERS = 256, 12


class Plain(nn.Module):
    """A model without `init_module`, which rank 0 builds for all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Own(Plain):
    """The same model with `init_module`, so that its modules are initialised one by one."""

    def init_module(self, module: nn.Module) -> None:
        module.reset_parameters()  # type: ignore[operator]


def initialised(kind: str, zero: int) -> tuple[int, int]:
    """Return the peak of the live bytes, and the live bytes at the end."""
    config = Config(parallel=ParallelConfig(dp_replicate=1, dp_shard=-1, zero=zero))
    build = Own if kind == "init_module" else Plain
    with Live() as live:
        model = spread(build, config)
        # On a busy machine, what was sent to the other rank has been alive for a moment longer.
        deadline, half = time.monotonic() + 60, 2 * LAYERS * (WIDTH * WIDTH + WIDTH)
        while (end := live.now()) > 1.01 * half and time.monotonic() < deadline:
            time.sleep(0.01)
    assert model.parameters
    return live.peak, end


@pytest.mark.parametrize("zero", [1, 3])
def test_modules_are_initialised_one_by_one(zero: int) -> None:
    whole = 4 * LAYERS * (WIDTH * WIDTH + WIDTH)
    for peak, end in run_ranks(initialised, 2, "init_module", zero):
        assert end == pytest.approx(whole / 2, rel=0.01)
        # These are the largest module and its part for this rank.
        assert peak - end <= 2 * whole / LAYERS * 1.01


def test_only_rank_0_holds_the_whole() -> None:
    whole = 4 * LAYERS * (WIDTH * WIDTH + WIDTH)
    (first, end), (other, _) = run_ranks(initialised, 2, "plain", 3)
    assert end == pytest.approx(whole / 2, rel=0.01)
    assert first - end >= whole
    assert other - end <= 3 * whole / LAYERS * 1.01
