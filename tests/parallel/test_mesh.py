"""The place of each rank in the grid of five degrees."""

from types import SimpleNamespace

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from hpctrain.config.rules.degrees import Degrees
from hpctrain.engine.parallel.mesh import Mesh
from hpctrain.engine.parallel.wrappers import parallel_model

DEGREES = Degrees(dp_replicate=2, dp_shard=2, cp=2, tp=2, pp=2)
MESHES = [Mesh(DEGREES, rank, torch.device("cpu")) for rank in range(32)]


def test_every_rank_has_a_place_of_its_own() -> None:
    places = {(mesh.pp_rank, mesh.dp_rank, mesh.cp_rank, mesh.tp_rank) for mesh in MESHES}
    assert len(places) == 32
    assert {mesh.dp_rank for mesh in MESHES} == set(range(4))
    assert all(mesh.dp_size == 4 and mesh.dp_cp_size == 8 for mesh in MESHES)


def test_ranks_that_divide_a_layer_are_neighbours_with_one_random_stream() -> None:
    for first, second in zip(MESHES[::2], MESHES[1::2], strict=True):
        assert (first.tp_rank, second.tp_rank) == (0, 1)
        assert first.stream == second.stream
    assert len({mesh.stream for mesh in MESHES}) == 16  # all others draw other numbers


def test_the_sums_of_each_sample_count_once() -> None:
    for mesh in MESHES:  # as a pipeline does
        mesh.has_outputs = mesh.pp_rank == 1
    counting = [mesh for mesh in MESHES if mesh.is_counted]
    # Each of these has other samples, or other positions of them.
    parts = [(mesh.dp_rank, mesh.cp_rank) for mesh in counting]
    assert len(parts) == len(set(parts)) == 8


@pytest.mark.usefixtures("group_of_one")
def test_who_has_the_same_elements_is_asked_once_for_each_layout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    grid = init_device_mesh("cpu", (1, 1))
    layouts = [Shard(0), Replicate()], [Replicate(), Replicate()], [Replicate(), Shard(1)]
    gradients = [distribute_tensor(torch.ones(2, 2), grid, layouts[n % 3]) for n in range(30)]
    asked = []
    shape = property(lambda self: (asked.append(self), (2, 3))[1])
    monkeypatch.setattr(DeviceMesh, "shape", shape)
    of = SimpleNamespace(degrees=SimpleNamespace(ranks=12, pp=2))
    found = parallel_model._copies([*gradients, torch.ones(())], of)  # type: ignore[arg-type]
    assert found == [3, 6, 2] * 10 + [6]
    assert len(asked) == 3
