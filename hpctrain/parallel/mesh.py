"""The ranks as a grid with one dimension for each degree of parallelism.

    rank = (((pp_rank * dp_replicate + r) * dp_shard + s) * cp + cp_rank) * tp + tp_rank

The ranks of the innermost dimension communicate most, so they are neighbours, on one node. Ranks
that differ only in pp, cp or tp read the same samples.
"""

from collections.abc import Sequence
from functools import cached_property

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from hpctrain.config.rules.degrees import Degrees
from hpctrain.parallel.context import SequencePart


class Mesh:
    """This rank's place in the grid, and the groups of ranks that it communicates with.

    `weights` are the shares of the samples that each rank of a node takes, for each node; None
    means one.

    Attributes:
        dp_rank: This rank among those that divide the samples, 0 <= dp_rank < dp_size.
        shares: The samples of a step are divided into so many equal shares, of which this rank
            takes `weight` ones, from `first_share` on.
        cp_rank: The part of each sequence that this rank has, 0 <= cp_rank < cp.
        tp_rank: The part of each layer that this rank has, 0 <= tp_rank < tp.
        pp_rank: The part of the layers that this rank has, 0 <= pp_rank < pp.
        stream: The number of this rank's random stream. Ranks that divide a layer draw the same
            dropout masks, because each computes what all of them add to the residual stream.
    """

    def __init__(
        self,
        degrees: Degrees,
        rank: int,
        device: torch.device,
        weights: Sequence[int] | None = None,
    ) -> None:
        self.degrees, self.device, self._ranks = degrees, device, degrees.ranks
        self.dp_size = degrees.dp
        self.stream, self.tp_rank = divmod(rank, degrees.tp)
        data, self.cp_rank = divmod(self.stream, degrees.cp)
        self.pp_rank, self.dp_rank = divmod(data, degrees.dp)
        self.weight, self.first_share, self.shares = 1, self.dp_rank, degrees.dp
        if weights is not None:
            each = [weight for weight in weights for _ in range(degrees.dp // len(weights))]
            self.weight, self.first_share = each[self.dp_rank], sum(each[: self.dp_rank])
            self.shares = sum(each)

    @property
    def dp_cp_size(self) -> int:
        """The number of ranks over which gradients are averaged: those with other tokens."""
        return self.degrees.dp * self.degrees.cp

    @property
    def is_counted(self) -> bool:
        """Whether the sums of this rank count; ranks that divide a layer have the same ones."""
        return self.tp_rank == 0 and self.pp_rank == self.degrees.pp - 1

    @property
    def data_mesh(self) -> DeviceMesh:
        """The ranks over which gradients are reduced: dp_replicate, dp_shard, or both.

        cp counts as a part of dp_shard, or of dp_replicate if dp_shard is 1. All ranks of the
        process group ask for it together.
        """
        names = tuple(name for name in ("dp_replicate", "dp_shard") if self._sizes[name] > 1)
        return self._mesh[names or ("dp_shard",)]

    @property
    def replicas(self) -> list[dist.ProcessGroup]:
        """The groups of ranks that may have the same weights: along each dimension of the data."""
        names = [name for name in ("dp_replicate", "dp_shard") if self._sizes[name] > 1]
        return [self._mesh[name].get_group() for name in names]

    @property
    def tp_mesh(self) -> DeviceMesh:
        """The ranks that divide each layer; all ranks ask for this and what follows together."""
        return self._mesh["tp"]

    @property
    def pp_group(self) -> dist.ProcessGroup:
        """The ranks that divide the layers."""
        return self._mesh["pp"].get_group()

    @cached_property
    def cp_group(self) -> dist.ProcessGroup:
        """The ranks that divide each sequence."""
        cp, tp = self.degrees.cp, self.degrees.tp
        return self._grid(others=self._ranks // (cp * tp), cp=cp, tp=tp)["cp"].get_group()

    def experts(self, ep: int) -> tuple[DeviceMesh, DeviceMesh]:
        """Return the ranks that divide experts, and those that have the same experts.

        The first are a mesh of `ep` neighbours, within the innermost dimension of `data_mesh`; the
        others are `data_mesh` with that dimension divided by `ep`.
        """
        sizes = {n: size for n, size in self._sizes.items() if size > 1 or n == "dp_shard"}
        names = tuple(n for n in ("dp_replicate", "dp_shard") if self._sizes[n] > 1)
        sizes[names[-1]] //= ep
        order = list(sizes)
        order.insert(order.index(names[-1]) + 1, "ep")
        mesh = self._grid(**{name: (sizes | {"ep": ep})[name] for name in order})
        return mesh["ep"], mesh[names]

    @cached_property
    def sequence_part(self) -> SequencePart | None:
        """This rank's part of each sequence; None if cp is 1."""
        cp = self.degrees.cp
        return SequencePart(self.cp_rank, cp, self.cp_group) if cp > 1 else None

    @cached_property
    def stage_group(self) -> dist.ProcessGroup | None:
        """The ranks that have the same layers; None means all ranks."""
        pp = self.degrees.pp
        return self._grid(pp=pp, stage=self._ranks // pp)["stage"].get_group() if pp > 1 else None

    @cached_property
    def batch_group(self) -> dist.ProcessGroup:
        """The ranks that have the other rows and positions of a batch, for the same layers.

        The group is one of its own, because backward passes reduce gradients in others meanwhile.
        """
        grid = torch.arange(self._ranks).view(self.degrees.pp, self.dp_cp_size, self.degrees.tp)
        groups = grid.transpose(1, 2).reshape(-1, self.dp_cp_size).tolist()
        group: dist.ProcessGroup = dist.new_subgroups_by_enumeration(groups)[0]
        return group

    def add(self, values: torch.Tensor) -> None:
        """Replace `values`, alike in shape and dtype, by their sum over all ranks, in place."""
        if self._ranks > 1:  # a reduction takes 50 us even in a group of one
            dist.all_reduce(values)

    def largest(self, values: torch.Tensor) -> list[float]:
        """Return the maximum over all ranks of each of `values`, shape (n,), on its device."""
        if self._ranks > 1:
            dist.all_reduce(values, op=dist.ReduceOp.MAX)
        return list(values.tolist())

    @cached_property
    def _sizes(self) -> dict[str, int]:
        degrees = self.degrees
        sharded = degrees.dp_shard > 1
        return {  # the outermost dimension first
            "pp": degrees.pp,
            "dp_replicate": degrees.dp_replicate * (1 if sharded else degrees.cp),
            "dp_shard": degrees.dp_shard * (degrees.cp if sharded else 1),
            "tp": degrees.tp,
        }

    @cached_property
    def _mesh(self) -> DeviceMesh:
        # It is made when it is needed, since each dimension costs a rendezvous.
        sizes = {n: size for n, size in self._sizes.items() if size > 1 or n == "dp_shard"}
        return self._grid(**sizes)

    def _grid(self, **sizes: int) -> DeviceMesh:
        """Return all ranks as a grid of these dimensions, the outermost first."""
        kind = self.device.type
        return init_device_mesh(kind, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
