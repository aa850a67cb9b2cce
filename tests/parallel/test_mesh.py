"""The place of each rank in the grid of five degrees."""

import torch

from hpctrain.config.rules.degrees import Degrees
from hpctrain.engine.parallel.mesh import Mesh

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
