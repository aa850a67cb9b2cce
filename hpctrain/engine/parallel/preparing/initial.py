"""The initial parameters: bit by bit the same for every way to spread a model, on every device.

    rank 0 draws module 0 ──┐
    rank 1 draws module 1 ──┼── each is sent to all ranks, which keep their part ── modules 2, 3, …

A model with a method `init_module(module)`, as `hpctrain.models.Model` has it, is built without
memory (on the meta device), then sharded, and then initialised module by module. The random
generator is seeded anew with the name of each module, so no rank ever holds more than one module as
a whole, and one that others send.

One rank draws a module, on its CPU. What a GPU draws depends on its number of multiprocessors, and
what a CPU draws on its vector instructions, so replicas that draw by themselves may differ.

Any other model is built as usual: on every rank, or when it is sharded on rank 0 alone, which sends
each rank its part.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
import xxhash
from torch import nn
from torch.distributed.tensor import DTensor

from hpctrain.base.errors import DistributedError
from hpctrain.data.generators import seed_generators
from hpctrain.engine.distributed.tensors import is_released, local, own_region
from hpctrain.engine.layers.ties import tie, ties
from hpctrain.engine.parallel.preparing.whole_model import undivided
from hpctrain.engine.parallel.setup import Build, Setup

log = logging.getLogger(__name__)
# The beginning of the names of a module's tensors, the module, and the keys of its own tensors.
_Holder = tuple[str, nn.Module, list[str]]
_Value = tuple[str, torch.Tensor]
Values = Literal["by modules", "from rank 0", "built"]
"""Where initial values come from: `init_module`, rank 0, or the constructor on every rank."""


def skeleton(build: Build, seed: int) -> nn.Module | None:
    """Return the model on the meta device; None when it cannot be built there."""
    try:
        with torch.device("meta"):
            seed_generators(seed)
            return build()
    except Exception as error:  # what is wrong with the model itself is raised by the next build
        _say_why(error)
        return None


def _say_why(error: Exception) -> None:
    # The constructor reads a value, for example, which a tensor without memory does not have.
    reason = next(iter(str(error).splitlines()), type(error).__name__)
    if not dist.is_initialized() or dist.get_rank() == 0:
        log.info("the model cannot be built on the meta device, so all ranks build it: %s", reason)


def begin(setup: Setup) -> tuple[nn.Module, Values]:
    """Return the model to spread, and how `fill` will give it its initial values.

    It is on the meta device, or, if every rank has to build it, has memory on the CPU.
    """
    build, seed = setup.build, setup.training.seed
    if isinstance(build, nn.Module):
        return build, "built"
    model = skeleton(build, seed)
    if model is not None and hasattr(model, "init_module"):
        return model, "by modules"
    # Rank 0 cannot send what it does not have, so the ranks of a stage build it themselves.
    if model is not None and not setup.whole and setup.mesh.degrees.pp == 1:
        return model, "from rank 0"
    seed_generators(seed)
    return build(), "built"


def fill(setup: Setup, model: nn.Module, values: Values) -> None:
    """Give a model that `begin` has returned its initial values, in place."""
    device, storage = setup.precision.device, setup.storage
    if values != "built":
        allocate(model, storage)
        if storage.type != "meta":  # else there is no memory for values: only the sizes are wanted
            _take_values(setup, model, values)
    if storage != device:
        _to_device(model, device)


def _take_values(setup: Setup, model: nn.Module, values: Values) -> None:
    """Give a model its part of the initial values, one tensor after the other."""
    targets = {name: tensor for name, tensor in _named(model).items() if not is_released(tensor)}
    made = _by_modules if values == "by modules" else _of_rank_0
    for name, whole in made(setup, targets):
        target = targets[name]
        part = whole[own_region(target)] if isinstance(target, DTensor) else whole
        with torch.no_grad():
            local(target).copy_(part)
    seed_generators(setup.training.seed)  # the ranks have drawn other modules


def _named(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the parameters and buffers of a model; what modules share has several names."""
    parameters = model.named_parameters(remove_duplicate=False)
    return {**dict(parameters), **dict(model.named_buffers(remove_duplicate=False))}


def _by_modules(setup: Setup, targets: Mapping[str, torch.Tensor]) -> Iterator[_Value]:
    """Return the initial values of the model that is built, module by module.

    The modules that have the `targets` may have other classes by now, but their names are the same.
    All ranks that have the same modules call this together.
    """
    seed, group = setup.training.seed, setup.mesh.stage_group
    original: Any = skeleton(setup.build, seed)
    holders = []
    for name, module in original.named_modules():
        start = f"{name}." if name else ""
        if keys := [key for key in _own(module) if start + key in targets]:
            holders.append((start, module, keys))
    alone = not dist.is_initialized() or dist.get_world_size(group) == 1
    return _drawn(original, holders, seed) if alone else _sent(setup, original, holders)


def _drawn(original: Any, holders: Sequence[_Holder], seed: int) -> Iterator[_Value]:
    """Yield the initial values, drawn by this process alone."""
    for start, module, keys in holders:
        drawn = _draw(original, start, module, seed)
        for key in keys:
            yield start + key, drawn[key]


def _sent(setup: Setup, original: Any, holders: Sequence[_Holder]) -> Iterator[_Value]:
    """Yield the initial values, of which each rank of the group draws some and sends them."""
    seed, device, group = setup.training.seed, setup.precision.device, setup.mesh.stage_group
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    for begin in range(0, len(holders), ranks):
        turn = holders[begin : begin + ranks]
        drawn, error = {}, None
        if rank < len(turn):
            try:
                drawn = _draw(original, *turn[rank][:2], seed)
            except Exception as raised:  # the other ranks must not wait for this one
                error = raised
        first = torch.tensor(rank if error is not None else ranks, device=device)
        dist.all_reduce(first, dist.ReduceOp.MIN, group)
        failed = int(first)
        if error is not None:
            raise error
        if failed < ranks:
            _draw(original, *turn[failed][:2], seed)  # the same error, on every rank
            name = turn[failed][0].removesuffix(".")
            raise DistributedError(f"another rank could not draw the values of {name}")
        for source, (start, module, keys) in enumerate(turn):
            for key in keys:
                like = _own(module)[key]
                if source == rank:
                    whole = drawn[key].to(device)
                else:
                    whole = torch.empty(like.shape, dtype=_drawn_dtype(like), device=device)
                _broadcast(whole, source, group)
                yield start + key, whole


def _draw(model: Any, start: str, module: nn.Module, seed: int) -> dict[str, torch.Tensor]:
    """Return the initial values of what a module itself holds, on the CPU; it stays as it was."""
    before = dict(module._parameters), dict(module._buffers)
    text = f"{seed} {start.removesuffix('.')}"
    seed_generators(xxhash.xxh64_intdigest(text.encode()) >> 1)
    for key, like in _own(module).items():
        whole = torch.empty(like.shape, dtype=_drawn_dtype(like), device="cpu")
        if key in module._parameters:
            module._parameters[key] = nn.Parameter(whole, like.requires_grad)
        else:
            module._buffers[key] = whole
    with torch.no_grad():
        model.init_module(module)
    drawn = {key: value.detach().contiguous() for key, value in _own(module).items()}
    module._parameters.update(before[0])
    module._buffers.update(before[1])
    return drawn


def _own(module: nn.Module) -> dict[str, torch.Tensor]:
    own = {**module._parameters, **module._buffers}
    return {key: value for key, value in own.items() if value is not None}


def _drawn_dtype(like: torch.Tensor) -> torch.dtype:
    drawn = isinstance(like, nn.Parameter) and like.is_floating_point()
    return torch.get_default_dtype() if drawn else like.dtype


def _of_rank_0(setup: Setup, targets: Mapping[str, torch.Tensor]) -> Iterator[_Value]:
    """Yield the initial values of a model that rank 0 builds, and sends to all ranks."""
    built: dict[str, torch.Tensor] = {}
    if dist.get_rank() == 0:
        seed_generators(setup.training.seed)
        built = _named(setup.build())
    sent: dict[int, str] = {}
    for name, target in targets.items():
        if sent.setdefault(id(target), name) != name:
            continue  # another name of a tensor that several modules share
        if built:
            whole = built[name].detach().to(setup.precision.device, target.dtype).contiguous()
        else:
            whole = torch.empty(target.shape, dtype=target.dtype, device=setup.precision.device)
        _broadcast(whole, 0, None)
        yield name, whole


def place(setup: Setup, model: nn.Module) -> None:
    """Bring a model that every rank has built to its device, with the values of one rank.

    It is the first one that has the same modules. The others may have drawn others.
    """
    group = setup.mesh.stage_group
    model.to(setup.storage)
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        return
    with torch.no_grad():
        for value in (*model.parameters(), *model.buffers()):
            if is_released(value):
                continue
            whole = value.detach().contiguous()
            _broadcast(whole, 0, group)
            value.copy_(whole)


def _broadcast(whole: torch.Tensor, source: int, group: dist.ProcessGroup | None) -> None:
    """Send a contiguous tensor of any dtype as bytes, since a backend does not know all dtypes."""
    if whole.numel() > 0:
        dist.broadcast(whole.view(-1).view(torch.uint8), group=group, group_src=source)


def _to_device(model: nn.Module, device: torch.device) -> None:
    """Move all but the parameters that FSDP2 divides, which offload leaves on the CPU, in place."""
    shared = list(ties(model))
    apart = {id(parameter) for parameter in undivided(model)}
    for module in model.modules():
        for key, tensor in _own(module).items():
            if key in module._buffers:
                module._buffers[key] = tensor.to(device)
            elif id(tensor) in apart and tensor.device != device:
                moved = nn.Parameter(tensor.detach().to(device), tensor.requires_grad)
                module._parameters[key] = moved
    for first, others in shared:
        tie(model, first, others)


def allocate(model: nn.Module, device: torch.device) -> None:
    """Give the parameters and buffers of the meta device memory, and keep ties between them."""
    shared = list(ties(model))
    model._apply(lambda t: t if is_released(t) else torch.empty_like(t, device=device))
    for first, others in shared:
        tie(model, first, others)
