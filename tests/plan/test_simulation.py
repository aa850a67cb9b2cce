"""`plan --simulate`: what a rank of a large world holds, and what it sends in a step."""

import json
from typing import Any

import pytest
import torch

from hpctrain.config.rules.degrees import Degrees
from hpctrain.errors import ConfigError
from hpctrain.parallel.mesh import Mesh
from hpctrain.plan.plan_command import main
from hpctrain.plan.simulation import coordinates, dimensions, picture

LM = ["model=lm_small", "--sample-shape", "65", "train.global_batch_size=64", "precision=bf16"]
LM += ["launch.nodes=8", "--nodes", "8", "launch.tasks_per_node=8", "train.clip_norm=1.0"]
PARAMETERS = 1_328_256
TABLE = 4096 * 128
PADDED = PARAMETERS + 4 * 2 * (384 - 352) * 128  # gate and up have 352 rows, on 64 ranks 384


def simulated(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main([*LM, *words, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)["simulation"]
    return found


def traffic(found: dict[str, Any]) -> dict[tuple[str, str], tuple[int, int]]:
    assert found["not_simulated"] == ""
    return {
        (each["kind"], each["dimensions"]): (each["calls"], each["nbytes"])
        for each in found["collectives"]
    }


def test_zero3_on_64_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    found = simulated(capsys, "parallel=zero3", "--simulate", "9")
    assert (found["rank"], found["ranks"]) == (9, 64)
    assert found["holds"] == "part 9 of 64 of each parameter"
    assert found["part"]["parameters"] == PARAMETERS
    assert found["part"]["local_optimizer"] == 2 * found["part"]["local_parameters"]
    counted = traffic(found)
    # Four blocks and the rest: their gradients in float32; their parameters in bfloat16, which the
    # backward pass gathers again for the blocks.
    assert counted["reduce-scatter", "dp_shard"] == (5, 4 * PADDED)
    calls, nbytes = counted["all-gather", "dp_shard"]
    assert calls == 5 + 4
    again = PADDED - TABLE - 128
    assert nbytes == 2 * (PADDED + again)
    assert counted["all-reduce", "dp_shard"][0] == 2  # the sums of the step, and the norm
    assert "  node 1    8:8   9:9 " in found["mesh"][2]


@pytest.mark.slow
def test_every_dimension_has_its_own_traffic(capsys: pytest.CaptureFixture[str]) -> None:
    found = simulated(capsys, "parallel=hsdp", "parallel.dp_shard=4", "parallel.tp=2", "--simulate")
    counted = traffic(found)
    whole = counted["reduce-scatter", "dp_shard"][1]
    assert counted["all-reduce", "dp_replicate"] == (5, whole // 4)
    assert whole == pytest.approx(4 * PARAMETERS / 2, rel=0.01)  # tp divides all but the norms
    assert counted["all-gather", "tp"][0] >= 2 * 4  # attention and MLP of each block
    assert ("all-reduce", "dp_replicate x dp_shard x tp") in counted
    assert found["holds"] == "part 0 of 4 of each parameter, replica 0, part 0 of 2 of each layer"


@pytest.mark.slow
def test_a_reader_sees_the_picture(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*LM, "parallel=zero3", "--simulate"]) == 0
    text = capsys.readouterr().out
    assert "simulation of rank 0 of 64" in text
    assert "  node 7   56:56  57:57" in text
    assert "reduce-scatter  over dp_shard (64 ranks): 5 calls" in text


@pytest.mark.slow
def test_a_rank_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match="--simulate=64: the layout has the ranks 0 to 63"):
        main([*LM, "parallel=zero3", "--simulate", "64"])


def test_coordinates_are_those_of_the_mesh() -> None:
    degrees = Degrees(dp_replicate=2, dp_shard=3, cp=2, tp=2, pp=2)
    for rank in range(degrees.ranks):
        mesh, place = Mesh(degrees, rank, torch.device("cpu")), coordinates(degrees, rank)
        assert (place["pp"], place["cp"], place["tp"]) == (mesh.pp_rank, mesh.cp_rank, mesh.tp_rank)
        assert place["dp_replicate"] * 3 + place["dp_shard"] == mesh.dp_rank
    assert dimensions(degrees, [0, 1]) == "tp"
    assert dimensions(degrees, [0, 4, 8]) == "dp_shard"
    assert dimensions(degrees, range(48)) == "pp x dp_replicate x dp_shard x cp x tp"
    assert "  ...    24 nodes" in "\n".join(picture(Degrees(dp_shard=256), 8))


def test_ddp_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="ddp cannot be simulated: each rank holds the whole"):
        simulated(capsys, "parallel=ddp", "--simulate")
