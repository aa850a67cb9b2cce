"""What a layout, float8, checkpointing and the compiler change in a model, or in a stage of it.

    plan ── cut ── tp ── cp ── ep ── float8 ── checkpointing ── compile ── shard

The order matters: what is compiled contains the checkpointing, and what is sharded is compiled. A
model that each rank has whole, and that is trained as it is written, does not come here.
"""

import logging

import torch
import torch.distributed as dist
from torch import nn

from hpctrain.base import offered
from hpctrain.base.errors import ConfigError
from hpctrain.base.terminal.terminal import few
from hpctrain.config.rules.degrees import bubble
from hpctrain.engine.layers.plan import Plan
from hpctrain.engine.parallel import second_gradients
from hpctrain.engine.parallel.dividing.chosen_plan import find_plan
from hpctrain.engine.parallel.dividing.expert_parallel import divide_experts
from hpctrain.engine.parallel.dividing.stages import block_counts, cut, present
from hpctrain.engine.parallel.dividing.tensor import divide_layers, sequence_is_divided
from hpctrain.engine.parallel.precision import compute_in_float8, float8_layers
from hpctrain.engine.parallel.preparing.activation_checkpointing import checkpoint_activations
from hpctrain.engine.parallel.preparing.blocks import find_blocks
from hpctrain.engine.parallel.preparing.initial import Values, place
from hpctrain.engine.parallel.reducing.expert_loads import compute_eagerly
from hpctrain.engine.parallel.setup import Setup
from hpctrain.engine.parallel.wrappers.fsdp import shard

log = logging.getLogger(__name__)


def change(setup: Setup, model: nn.Module, number: int, values: Values) -> None:
    """Make the stage `number` of a whole model, in place, whose initial values come from `values`.

    All ranks call this together.
    """
    parallel, train, mesh = setup.parallel, setup.train, setup.mesh
    degrees = mesh.degrees
    plan, names = Plan(), list[str]()
    if degrees.ranks > degrees.dp or parallel.ep > 1:
        plan = find_plan(model, parallel, degrees)
    if not setup.whole or train.activation_checkpointing != "none" or train.compile == "blocks":
        names = _blocks(setup, model)
    layers = float8_layers(model, parallel.blocks) if setup.precision.compute == "fp8" else []
    if degrees.pp > 1:
        _make_stage(setup, model, plan, number)
    if train.lora.quantize:
        offered.quantized.release(model, setup.storage)
    if values == "built":
        place(setup, model)
    if degrees.tp > 1:
        _check_compile(setup)
        divide_layers(model, plan, mesh, parallel, loss_parallel=setup.divided_loss)
    if mesh.sequence_part is not None:
        model.context = mesh.sequence_part  # type: ignore[assignment]
    experts = divide_experts(model, plan, mesh, parallel.ep)
    if layers:
        compute_in_float8(model, layers)
    blocks = list(present(model, names))
    shards = not setup.whole and (mesh.dp_cp_size > 1 or parallel.fsdp.offload)
    checkpoint_activations(blocks, train.activation_checkpointing)
    if train.compile == "off":  # torch refuses by itself what is compiled
        second_gradients.refuse(blocks, mesh)
    else:
        compute_eagerly(model)
        _compile([model] if train.compile == "model" else blocks, shards)
    if shards:
        shard(model, blocks, setup, experts)


def _compile(modules: list[nn.Module], shards: bool) -> None:
    """Let torch compile modules, also those whose `forward` is that of a class of torch.

    Such ones, as nn.Sequential or nn.TransformerEncoderLayer, torch leaves alone without a word
    (https://github.com/pytorch/pytorch/issues/150915). With `wrap_top_frame` it compiles them, too,
    but not with the hooks of FSDP.
    """
    of_torch = [each for each in modules if each.forward.__module__.startswith("torch.nn.")]
    for module in modules:
        with torch._dynamo.config.patch(wrap_top_frame=module in of_torch and not shards):
            module.compile()
    if of_torch and shards and dist.get_rank() == 0:
        log.warning(
            "train.compile has no effect on %s: torch does not compile its own classes where FSDP "
            "divides their parameters; a class of your own with the same forward is compiled",
            few(dict.fromkeys(type(each).__name__ for each in of_torch), 4),
        )


def _make_stage(setup: Setup, model: nn.Module, plan: Plan, number: int) -> None:
    """Leave a whole model what the stage `number` of a pipeline has; rank 0 tells of them all."""
    parallel, degrees = setup.parallel, setup.mesh.degrees
    counts, schedule = block_counts(model, plan, parallel, degrees.pp), parallel.pipeline.schedule
    cut(model, plan, counts, number)
    if number > 0 and hasattr(model, "sequence_parts"):  # of a sequence within the stages
        tp = degrees.tp if sequence_is_divided(plan, parallel) else 1
        setattr(model, "sequence_parts", degrees.cp * tp)  # noqa: B010 (mypy)
    if number == dist.get_rank() == 0:
        log.info(
            "pipeline %s: stages of %s blocks, %d micro-batches, expected bubble %.1f%%",
            *(schedule, " + ".join(map(str, counts)), setup.accumulate),
            100 * bubble(schedule, degrees.pp, setup.accumulate),
        )


def _blocks(setup: Setup, model: nn.Module) -> list[str]:
    """Return the names of the blocks of a whole model."""
    try:
        return [name for name, _ in find_blocks(model, setup.parallel.blocks)]
    except ConfigError as error:
        if setup.training.ours:
            raise
        if dist.get_rank() == 0:
            log.info("its parameters are gathered all together: %s", error)
    return []


def _check_compile(setup: Setup) -> None:
    """Refuse a compiler that cannot have tensor parallel."""
    compile = setup.train.compile
    if setup.precision.device.type == "cpu" and compile != "off":
        raise ConfigError(
            f"train.compile={compile} with parallel.tp={setup.parallel.tp} on CPUs: "
            "torch fails; use train.compile=off"
        )
