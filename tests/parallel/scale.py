"""Runs the recipe of one rank of a large world, and puts plan's formulas beside what it holds.

The other ranks do not exist: the process group is fake, and the tensors have no memory.

A test gets the reports as JSON. The following command prints a table:

python -m tests.parallel.scale llama3_70b:512:zero3 llama3_405b:4096:hsdp
"""

import json
import math
import resource
import sys
import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import distributed
from torch.distributed.tensor import DTensor, Shard, debug
from torch.testing._internal.distributed.fake_pg import FakeStore

from hpctrain.config.rules.degrees import Degrees
from hpctrain.config.schema import Config
from hpctrain.models import Transformer
from hpctrain.parallel.dividing.stages import block_counts, cut, present
from hpctrain.parallel.mesh import Mesh
from hpctrain.parallel.precision import Precision
from hpctrain.parallel.preparing.blocks import find_blocks
from hpctrain.parallel.preparing.initial import Build, skeleton
from hpctrain.parallel.recipe import parallelize
from hpctrain.plan.memory import memory_of
from hpctrain.plan.model_sizes import ModelSizes

CONF = Path(__file__).parents[2] / "conf" / "model"
NODE = 8  # number of ranks; hsdp divides a replica over one node


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


@dataclass(frozen=True, kw_only=True)
class Report(RankPart):
    """What one rank holds, and what the formulas give; all sizes are in bytes."""

    cell: str
    seconds: float
    max_rss: int
    formula_parameters: int
    formula_gradients: int
    formula_optimizer: int
    formula_peak: int


def config_of(strategy: str) -> Config:
    """Return the config of zero1 to zero3, hsdp or ddp, in bf16 with fp32 parameters.

    Other degrees may follow: zero3+tp8.
    """
    config = Config()
    config.precision.compute = "bf16"
    parallel = config.parallel
    strategy, *others = strategy.split("+")
    parallel.dp_replicate, parallel.dp_shard = (-1, NODE) if strategy == "hsdp" else (1, -1)
    parallel.zero = int(strategy[4:]) if strategy.startswith("zero") else 3
    for other in others:
        setattr(parallel, other[:2], int(other[2:]))
    return config


def part_of(build: Build, config: Config) -> RankPart:
    """Return what the rank of this process holds: the whole recipe, and a step of the optimizer."""
    degrees = Degrees.of(config.parallel, distributed.get_world_size())
    mesh = Mesh(degrees, distributed.get_rank(), torch.device("cpu"))
    parallel = parallelize(build, config, mesh, Precision(config.precision, torch.device("meta")))
    optimizer = torch.optim.AdamW(parallel.parameters)
    for parameter in parallel.parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    kept = (pair for state in optimizer.state.values() for pair in state.items())
    states = [v for k, v in kept if k != "step" and isinstance(v, torch.Tensor)]
    named = list(parallel.module.named_parameters())
    return RankPart(
        parameters=sum(p.numel() for p in parallel.parameters),
        whole=tuple(name for name, p in named if not isinstance(p, DTensor)),
        too_large=tuple(name for name, p in named if not _divided(p, degrees)),
        local_parameters=sum(map(_local_bytes, parallel.parameters)),
        local_gradients=sum(_local_bytes(p.grad) for p in parallel.parameters),
        local_optimizer=sum(map(_local_bytes, states)),
        shared=len(list(parallel.module.named_parameters(remove_duplicate=False))) - len(named),
    )


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


def enter(rank: int, world: int) -> None:
    """Make this process a rank of a world whose other ranks do not exist."""
    if distributed.is_initialized():
        distributed.destroy_process_group()
    debug._clear_sharding_prop_cache()  # the cache remembers the rank
    distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)


def place(strategy: str, rank: int, world: int) -> dict[str, Any]:
    """Return where a rank is in the mesh, without making a model."""
    enter(rank, world)
    degrees = Degrees.of(config_of(strategy).parallel, world)
    mesh = Mesh(degrees, rank, torch.device("cpu"))
    sharding = mesh.data_mesh
    return {
        "rank": rank,
        "dp_rank": mesh.dp_rank,
        "dp_size": mesh.dp_size,
        "names": sharding.mesh_dim_names,
        "shape": sharding.shape,
        "coordinate": sharding.get_coordinate(),
        # The ranks that divide this rank's replica.
        "shard_neighbours": sharding["dp_shard"].mesh.tolist(),
    }


def simulate(model: str, world: int, strategy: str, rank: int = 0, **options: Any) -> Report:
    """Build one rank's part of a model of conf/model, and the state of its optimizer."""
    start = time.perf_counter()
    enter(rank, world)
    keys = yaml.safe_load((CONF / f"{model}.yaml").read_text()) | options
    del keys["_target_"]
    build = partial(Transformer, **keys)
    config = config_of(strategy)
    degrees = Degrees.of(config.parallel, world)
    bare = skeleton(build, 0)
    assert bare is not None
    plan = bare.plan.tensor if isinstance(bare, Transformer) else {}
    names = [name for name, _ in find_blocks(bare, [])]
    config.train.accumulate = 2 * degrees.pp if degrees.pp > 1 else 1
    if degrees.pp > 1 and isinstance(bare, Transformer):
        counts = block_counts(bare, bare.plan, config.parallel, degrees.pp)
        cut(bare, bare.plan, counts, rank * degrees.pp // world)
    sizes = ModelSizes.of(bare, list(present(bare, names)), plan, degrees.tp)
    del bare
    formula = memory_of(sizes, degrees, config, config.train.accumulate)
    part = part_of(build, config)
    return Report(
        **vars(part),
        cell=f"{model}:{world}:{strategy}",
        seconds=round(time.perf_counter() - start, 2),
        max_rss=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        formula_parameters=formula.parameters,
        formula_gradients=formula.gradients,
        formula_optimizer=formula.optimizer,
        formula_peak=formula.peak,
    )


def main() -> None:
    print("| model:world:strategy | s | parameters | optimizer | formula | peak | max RSS |")
    for cell in sys.argv[1:]:
        model, world, strategy = cell.split(":")
        one = simulate(model, int(world), strategy)
        sizes = (
            *(one.local_parameters, one.local_optimizer),
            *(one.formula_parameters + one.formula_optimizer, one.formula_peak, one.max_rss),
        )
        gib = " | ".join(f"{size / 2**30:.3f} GiB" for size in sizes)
        print(f"| {cell} | {one.seconds} | {gib} |", flush=True)


def answer(text: str) -> None:
    """Print the reports and places that a test requests, both as JSON."""
    asked = json.loads(text)
    reports = [asdict(simulate(*cell[:4], **cell[4])) for cell in asked["cells"]]
    places = [place(*triple) for triple in asked["places"]]
    print(json.dumps({"reports": reports, "places": places}))


if __name__ == "__main__":
    if len(sys.argv) == 2 and sys.argv[1].startswith("{"):
        answer(sys.argv[1])
    else:
        main()
