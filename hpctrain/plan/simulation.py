"""`plan --simulate`: the chosen recipe of a rank at full rank count, with one step of training.

fake process group (collectives do nothing) ── one rank of the world
part_of() ── what the rank holds                          (meta tensors)
step      ── collectives by kind and dimension of the mesh (fake tensors)

rank = (((pp x dp_replicate + r) x dp_shard + s) x cp + c) x tp + t        as hpctrain.parallel.mesh
"""

import math
import resource
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import distributed
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.distributed_c10d import GroupName, _resolve_process_group
from torch.distributed.tensor import DTensor, Shard, debug
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hpctrain.config.rules.degrees import Degrees
from hpctrain.config.schema import Config
from hpctrain.errors import ConfigError
from hpctrain.job.building.instantiate import instantiate
from hpctrain.parallel.mesh import Mesh
from hpctrain.parallel.precision import Precision
from hpctrain.parallel.preparing.initial import Build
from hpctrain.parallel.recipe import parallelize
from hpctrain.parallel.reducing.lockstep import Lockstep
from hpctrain.parallel.wrappers import parallel_model
from hpctrain.parallel.wrappers.parallel_model import ParallelModel
from hpctrain.plan.inspecting.activations import NEED_VALUES
from hpctrain.plan.inspecting.sample_shape import task_and_sample
from hpctrain.plan.layouts import Layout
from hpctrain.shards.types import Batch
from hpctrain.tasks.task import Sums, Task, on_part
from hpctrain.units import MIB

_ORDER = ("pp", "dp_replicate", "dp_shard", "cp", "tp")  # the outermost first
# They are in the names of torch's operators, with or without underscores. The first counts.
_KINDS = ("reduce-scatter", "all-gather", "all-reduce", "all-to-all", "broadcast", "send")
_SPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd")
_SHOWN_NODES = 8
_HOLDS = {
    "pp": "the layers of stage {0}",
    "dp_shard": "part {0} of {1} of each parameter",
    "dp_replicate": "replica {0}",
    "cp": "part {0} of {1} of each sequence",
    "tp": "part {0} of {1} of each layer",
}


@dataclass
class _Traffic:
    """The operations of one kind over one group of ranks."""

    kind: str  # such as all-gather
    dimensions: str  # the degrees that the group crosses, such as dp_shard, joined by x
    ranks: int
    calls: int = 0
    # The sum of the messages; for a gather or scatter that of the whole, not of a rank's part.
    nbytes: int = 0


class _CollectiveCounter(TorchDispatchMode):
    """Counts while it is entered, by the degrees of the mesh."""

    def __init__(self, degrees: Degrees) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._degrees = degrees
        self._found: dict[tuple[str, tuple[int, ...]], _Traffic] = {}

    @property
    def traffic(self) -> list[_Traffic]:
        """What was counted, most bytes first."""
        return sorted(self._found.values(), key=lambda each: -each.nbytes)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the operation, and count it if it is one of a process group."""
        found = func(*args, **(kwargs or {}))
        if func.namespace in _SPACES:
            self._count(str(func), (args, kwargs, found))
        return found

    def _count(self, name: str, values: Any) -> None:
        bare, leaves = name.replace("_", ""), tree_leaves(values)
        kind = next((kind for kind in _KINDS if kind.replace("-", "") in bare), None)
        ranks = _ranks(leaves)
        if kind is None or ranks is None:
            return
        if (kind, ranks) not in self._found:
            crossed = dimensions(self._degrees, ranks)
            self._found[kind, ranks] = _Traffic(kind, crossed, len(ranks))
        traffic = self._found[kind, ranks]
        traffic.calls += 1
        sizes = (t.numel() * t.element_size() for t in leaves if isinstance(t, torch.Tensor))
        traffic.nbytes += max(sizes, default=0)


def _ranks(leaves: Sequence[Any]) -> tuple[int, ...] | None:
    """Return the ranks of the group among the arguments of an operation."""
    for leaf in leaves:
        group: Any = leaf
        # The operation of a reduction is a script object, too, and "sum" is no name of a group.
        with suppress(RuntimeError, TypeError, ValueError, KeyError):
            if isinstance(leaf, torch.ScriptObject):
                group = distributed.ProcessGroup.unbox(leaf)
            elif isinstance(leaf, str):
                group = _resolve_process_group(GroupName(leaf))
        if isinstance(group, distributed.ProcessGroup):
            return tuple(distributed.get_process_group_ranks(group))
    return None


@dataclass(frozen=True)
class RankPart:
    """The part of one rank."""

    parameters: int  # elements of the whole model, or of this rank's stages
    whole: tuple[str, ...]  # not divided
    too_large: tuple[str, ...]  # of which the rank has more than its part
    local_parameters: int  # bytes
    local_gradients: int  # bytes
    local_optimizer: int  # bytes that the optimizer keeps, as AdamW would
    shared: int  # additional names of tied parameters


@dataclass(frozen=True)
class _Simulation:
    """One rank of a world, as `--json` prints it, in bytes and seconds."""

    rank: int
    ranks: int
    degrees: Degrees
    holds: str  # in words
    part: RankPart
    collectives: list[_Traffic]  # of a step, most bytes first
    not_simulated: str  # why a step without values could not be made; "" if it was
    mesh: list[str]  # a picture of it, in lines
    seconds: float
    max_rss: int  # bytes, of this process so far

    def lines(self) -> Iterator[str]:
        """Yield the lines for a reader."""
        part = self.part
        yield f"simulation of rank {self.rank} of {self.ranks} ({self.seconds:.1f} s)"
        yield from self.mesh
        yield f"rank {self.rank} holds {self.holds}:"
        sizes = (part.local_parameters, part.local_gradients, part.local_optimizer)
        told = (f"{size / MIB:,.1f} MiB" for size in sizes)
        yield "  parameters {}, gradients {}, AdamW's state {}".format(*told)
        if self.not_simulated:
            yield f"its step cannot be made without values: {self.not_simulated}"
            return
        yield "collectives of a step (MiB of the whole messages)"
        for each in self.collectives:
            yield (
                f"  {each.kind:<15} over {each.dimensions} ({each.ranks} ranks): "
                f"{each.calls:,} calls, {each.nbytes / MIB:,.3f} MiB"
            )
        if not self.collectives:
            yield "  none"


def simulate(layout: Layout, shape: str | None, rank: int = 0) -> _Simulation:
    """Run the recipe of one rank, and a step of it; `shape` is the value of `--sample-shape`.

    It raises a ConfigError if the model cannot be divided so, there is no such rank, or it is ddp.
    """
    config, degrees, world = layout.config, layout.degrees, layout.ranks
    began = time.perf_counter()
    if not 0 <= rank < world:
        raise ConfigError(f"--simulate={rank}: the layout has the ranks 0 to {world - 1}")
    if layout.kind == "ddp":
        raise ConfigError(
            "--simulate: torch's DistributedDataParallel compares values of the ranks when it is "
            "made, so ddp cannot be simulated: each rank holds the whole model, and all-reduces "
            "each gradient once; name another layout, such as parallel=zero1"
        )
    enter(rank, world)
    try:
        task, sample = task_and_sample(config, shape)
        build = partial(instantiate, "model", config.model)
        part, model = part_of(build, config, loss_parallel=getattr(task, "loss_parallel", False))
        counter, why = _CollectiveCounter(degrees), ""
        try:
            _step(model, layout, task, sample, counter)
        except NEED_VALUES as error:
            why = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
    finally:
        _leave()
    return _Simulation(
        *(rank, world, degrees, _held_by(degrees, rank), part, [] if why else counter.traffic, why),
        mesh=[*picture(degrees, config.launch.tasks_per_node)],
        seconds=time.perf_counter() - began,
        max_rss=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    )


def part_of(
    build: Build, config: Config, *, loss_parallel: bool = False
) -> tuple[RankPart, ParallelModel]:
    """Return what the rank of this process holds, and its model on the meta device.

    The whole recipe runs as in a training, with one step of the optimizer.
    """
    degrees = Degrees.of(config.parallel, distributed.get_world_size())
    mesh = Mesh(degrees, distributed.get_rank(), torch.device("cpu"))
    precision = Precision(config.precision, torch.device("meta"))
    parallel = parallelize(build, config, mesh, precision, loss_parallel=loss_parallel)
    optimizer = torch.optim.AdamW(parallel.parameters)
    for parameter in parallel.parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    kept = (pair for state in optimizer.state.values() for pair in state.items())
    states = [v for k, v in kept if k != "step" and isinstance(v, torch.Tensor)]
    named = list(parallel.module.named_parameters())
    part = RankPart(
        parameters=sum(p.numel() for p in parallel.parameters),
        whole=tuple(name for name, p in named if not isinstance(p, DTensor)),
        too_large=tuple(name for name, p in named if not _divided(p, degrees)),
        local_parameters=sum(map(_local_bytes, parallel.parameters)),
        local_gradients=sum(_local_bytes(p.grad) for p in parallel.parameters),
        local_optimizer=sum(map(_local_bytes, states)),
        shared=len(list(parallel.module.named_parameters(remove_duplicate=False))) - len(named),
    )
    optimizer.zero_grad(set_to_none=True)
    return part, parallel


def _local_bytes(tensor: Any) -> int:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return int(local.untyped_storage().nbytes())


def _divided(parameter: torch.Tensor, degrees: Degrees) -> bool:
    """Whether FSDP2 divides the rows of what tensor parallel leaves of a parameter."""
    if not isinstance(parameter, DTensor):
        return False
    names, shape = parameter.device_mesh.mesh_dim_names or (), list(parameter.shape)
    if "tp" in names and isinstance(by_tp := parameter.placements[names.index("tp")], Shard):
        shape[by_tp.dim] //= degrees.tp
    rows = -(-shape[0] // (degrees.dp_shard * degrees.cp))
    return _local_bytes(parameter) <= rows * math.prod(shape[1:]) * parameter.element_size()


def _step(
    model: ParallelModel, layout: Layout, task: Task, sample: Batch, counter: _CollectiveCounter
) -> None:
    mesh, rows = model.mesh, layout.batch.share
    # Fake tensors are of a CPU, where FSDP2 runs; those of meta are refused by it.
    with FakeTensorMode(allow_non_fake_inputs=True), _without_values():
        model.module.to_empty(device="cpu")
        model.precision.device = torch.device("cpu")
        shapes = ((name, (rows, *v.shape[1:]), v.dtype) for name, v in sample.items())
        batch = {name: torch.zeros(shape, dtype=dtype) for name, shape, dtype in shapes}
        with counter:
            _, values = model.forward_backward(on_part(task, mesh.sequence_part), batch)
            mesh.add(torch.as_tensor(values))  # the one reduction of a step's sums
            model.scale_gradients(torch.ones(()), layout.config.train.clip_norm)


def enter(rank: int, world: int) -> None:
    """Make this process a rank of a world whose other ranks do not exist."""
    _leave()
    debug._clear_sharding_prop_cache()  # the cache remembers the rank
    distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)


def _leave() -> None:
    if distributed.is_initialized():
        distributed.destroy_process_group()


@contextmanager
def _without_values() -> Iterator[None]:
    """Let a step run on tensors without values, which a training reads in two places."""

    def flat(sums: Sums) -> torch.Tensor:  # on a CPU the sums of a loss are numbers
        return torch.stack([torch.as_tensor(v).double() for pair in sums.values() for v in pair])

    # The ranks agree on their next block in the first step: here all have the same.
    agreed = patch.object(Lockstep, "_agreed", lambda _, number: number)
    with agreed, patch.object(parallel_model, "flat", flat):
        yield


def _held_by(degrees: Degrees, rank: int) -> str:
    place, sizes = coordinates(degrees, rank), vars(degrees)
    parts = [text.format(place[n], sizes[n]) for n, text in _HOLDS.items() if sizes[n] > 1]
    return ", ".join(parts) or "everything"


def picture(degrees: Degrees, per_node: int) -> Iterator[str]:
    """Yield the lines of a picture: a line for each node, with the place of each of its ranks."""
    names = [name for name in _ORDER if getattr(degrees, name) > 1] or ["dp_replicate"]
    yield f"ranks by {' . '.join(names)} (the last one are neighbours)"
    nodes, width = -(-degrees.ranks // per_node), len(str(degrees.ranks - 1))
    left_out = max(0, nodes - _SHOWN_NODES)
    for node in (*range(min(nodes, _SHOWN_NODES) - 1), nodes - 1):
        if left_out and node == nodes - 1:
            yield f"  ...    {left_out} nodes"
        cells = []
        for rank in range(node * per_node, min(degrees.ranks, (node + 1) * per_node)):
            place = coordinates(degrees, rank)
            cells.append(f"{rank:>{width}}:{'.'.join(str(place[name]) for name in names)}")
        yield f"  node {node:<3} {'  '.join(cells)}"


def coordinates(degrees: Degrees, rank: int) -> dict[str, int]:
    """Return the place of a rank, by the names of the degrees."""
    found = {}
    for name in reversed(_ORDER):
        rank, found[name] = divmod(rank, getattr(degrees, name))
    return dict(reversed(found.items()))


def dimensions(degrees: Degrees, ranks: Sequence[int]) -> str:
    """Return which degrees distinguish these ranks, such as `dp_shard` or `dp_shard x cp`."""
    places = [coordinates(degrees, rank) for rank in ranks]
    crossed = [name for name in _ORDER if len({place[name] for place in places}) > 1]
    return " x ".join(crossed) or "one rank"
