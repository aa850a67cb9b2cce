"""The ranks as a grid with one dimension for each degree of parallelism.

    rank = ((pp * dp_replicate + r) * dp_shard + s) * cp * tp + ...

The ranks of the innermost dimension communicate most, so they are neighbours, on one node.
"""

from __future__ import annotations

from dataclasses import asdict

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from hpctrain.config.degrees import Degrees

_ORDER = ("pp", "dp_replicate", "dp_shard", "cp", "tp")  # the outermost dimension first


class Mesh:
    """This rank's place in the grid, and the groups of ranks that it communicates with.

    Args:
        degrees: The size of each dimension.
        rank: The rank of this process.
        device: Device of this rank.

    Attributes:
        dp_rank: This rank among those that divide the samples, 0 <= dp_rank < dp_size.
        dp_size: The number of ranks that divide the samples.
    """

    def __init__(self, degrees: Degrees, rank: int, device: torch.device) -> None:
        self.degrees, self._ranks = degrees, degrees.ranks
        self._type = device.type
        self._whole: DeviceMesh | None = None
        self.dp_size = degrees.dp
        self.dp_rank = rank // (degrees.cp * degrees.tp) % degrees.dp

    @property
    def sharding(self) -> DeviceMesh:
        """The mesh over which FSDP2 divides each replica, with dp_replicate where it is not 1.

        All ranks of the process group ask for it together.
        """
        replicated = self.degrees.dp_replicate > 1
        return self._mesh()[("dp_replicate", "dp_shard") if replicated else ("dp_shard",)]

    def add(self, values: torch.Tensor) -> None:
        """Replace `values` by their sum over all ranks, in place.

        Args:
            values: The same shape and dtype on every rank, on its device.
        """
        if self._ranks > 1:  # a reduction takes 50 us even in a group of one
            dist.all_reduce(values)

    def largest(self, values: torch.Tensor) -> list[float]:
        """Return the maximum over all ranks of each of `values`, shape (n,), on its device."""
        if self._ranks > 1:
            dist.all_reduce(values, op=dist.ReduceOp.MAX)
        return list(values.tolist())

    def _mesh(self) -> DeviceMesh:
        # It is made when it is needed, since each dimension costs a rendezvous.
        if self._whole is None:
            sizes = asdict(self.degrees)
            names = [name for name in _ORDER if sizes[name] > 1 or name == "dp_shard"]
            shape = tuple(sizes[name] for name in names)
            self._whole = init_device_mesh(self._type, shape, mesh_dim_names=tuple(names))
        return self._whole
