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
from hpctrain.engine.parallel.context import SequencePart


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
        has_outputs: Whether this rank has the outputs of the model. A pipeline sets it: it knows
            which rank has the last stage.
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
        self.degrees, self.rank, self.device = degrees, rank, device
        self.dp_size = degrees.dp
        self.stream, self.tp_rank = divmod(rank, degrees.tp)
        data, self.cp_rank = divmod(self.stream, degrees.cp)
        self.pp_rank, self.dp_rank = divmod(data, degrees.dp)
        self.has_outputs = degrees.pp == 1
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
        return self.tp_rank == 0 and self.has_outputs

    @property
    def data_mesh(self) -> DeviceMesh:
        """The ranks over which gradients are reduced: dp_replicate, dp_shard, or both.

        cp counts as a part of dp_shard, or of dp_replicate if dp_shard is 1. All ranks of the
        process group ask for it together.
        """
        return self._mesh[self._data or ("dp_shard",)]

    @property
    def replicas(self) -> list[dist.ProcessGroup]:
        """The groups of ranks that may have the same weights: along each dimension of the data."""
        return [self._mesh[name].get_group() for name in self._data]

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
        return self._grid(others=self.degrees.ranks // (cp * tp), cp=cp, tp=tp)["cp"].get_group()

    def experts(self, ep: int) -> tuple[DeviceMesh, DeviceMesh]:
        """Return the ranks that divide experts, and those that have the same experts.

        The first are a mesh of `ep` neighbours, within the innermost dimension of `data_mesh`; the
        others are `data_mesh` with that dimension divided by `ep`.
        """
        sizes: dict[str, int] = {}
        for name, size in self._sizes.items():
            sizes |= {name: size // ep, "ep": ep} if name == self._data[-1] else {name: size}
        mesh = self._grid(**sizes)
        return mesh["ep"], mesh[self._data]

    @cached_property
    def sequence_part(self) -> SequencePart | None:
        """This rank's part of each sequence; None if cp is 1."""
        cp = self.degrees.cp
        return SequencePart(self.cp_rank, cp, self.cp_group) if cp > 1 else None

    @cached_property
    def stage_group(self) -> dist.ProcessGroup | None:
        """The ranks that have the same layers; None means all ranks."""
        pp, ranks = self.degrees.pp, self.degrees.ranks
        return self._grid(pp=pp, stage=ranks // pp)["stage"].get_group() if pp > 1 else None

    @cached_property
    def batch_group(self) -> dist.ProcessGroup:
        """The ranks that have the other rows and positions of a batch, for the same layers.

        The group is one of its own, because backward passes reduce gradients in others meanwhile.
        """
        pp, tp = self.degrees.pp, self.degrees.tp
        grid = torch.arange(self.degrees.ranks).view(pp, self.dp_cp_size, tp)
        groups = grid.transpose(1, 2).reshape(-1, self.dp_cp_size).tolist()
        group: dist.ProcessGroup = dist.new_subgroups_by_enumeration(groups)[0]
        return group

    def add(self, values: torch.Tensor) -> None:
        """Replace `values`, alike in shape and dtype, by their sum over all ranks, in place."""
        if self.degrees.ranks > 1:  # a reduction takes 50 us even in a group of one
            dist.all_reduce(values)

    def largest(self, values: torch.Tensor) -> list[float]:
        """Return the maximum over all ranks of each of `values`, shape (n,), on its device."""
        if self.degrees.ranks > 1:
            dist.all_reduce(values, op=dist.ReduceOp.MAX)
        return list(values.tolist())

    @cached_property
    def _sizes(self) -> dict[str, int]:
        """The dimensions of more than one rank, and dp_shard; the outermost dimension is first."""
        degrees = self.degrees
        sharded = degrees.dp_shard > 1
        every = {
            "pp": degrees.pp,
            "dp_replicate": degrees.dp_replicate * (1 if sharded else degrees.cp),
            "dp_shard": degrees.dp_shard * (degrees.cp if sharded else 1),
            "tp": degrees.tp,
        }
        return {name: size for name, size in every.items() if size > 1 or name == "dp_shard"}

    @property
    def _data(self) -> tuple[str, ...]:
        return tuple(n for n in ("dp_replicate", "dp_shard") if self._sizes.get(n, 1) > 1)

    @cached_property
    def _mesh(self) -> DeviceMesh:
        # It is made when it is needed, since each dimension costs a rendezvous.
        return self._grid(**self._sizes)

    def _grid(self, **sizes: int) -> DeviceMesh:
        """Return all ranks as a grid of these dimensions, the outermost first."""
        kind = self.device.type
        return init_device_mesh(kind, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
