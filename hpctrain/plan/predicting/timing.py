"""The time of a step: an estimate from a few stated efficiencies.

    products / (peak x efficiency)  ──┐
    attention, half of its square   ──┤
    bytes / HBM bandwidth           ──┼── / (1 - bubble) ── + optimizer ── step
    collectives that are not hidden ──┘

The collectives follow the alpha-beta model of their slowest link, as a ring (Thakur et al. 2005):

    all-gather, reduce-scatter   (n - 1) alpha + (n - 1) / n x bytes / beta
    all-reduce                   twice that

NCCL takes trees where latency matters, so alpha counts for log2(n) hops at most.

The efficiency of a matrix product grows with its size: `best` x s / (s + half), where s is the
harmonic mean of its three sizes. `efficiencies` has the constants.
"""

import math
from dataclasses import dataclass

from hpctrain.config.rules.combinations import async_tp_problems
from hpctrain.config.rules.pipeline_schedule import bubble
from hpctrain.config.schema import Config
from hpctrain.estimates.optimizer_states import optimizer_states
from hpctrain.hardware import Hardware, Link
from hpctrain.plan.inspecting.activations import Activations
from hpctrain.plan.inspecting.model_facts import ModelFacts
from hpctrain.plan.layouts import Layout
from hpctrain.plan.memory import computed_bytes, reduced_bytes, shards, stored_bytes
from hpctrain.plan.predicting.efficiencies import LINK, Efficiencies


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step."""

    step_s: float
    compute_s: float  # matrix products and attention
    memory_s: float  # work that is bound by the bandwidth of the memory
    comm_s: float  # all of a rank
    exposed_comm_s: float  # the part that is not hidden behind computing
    bubble: float  # the part of the step in which a rank of a pipeline waits
    mfu: float  # FLOPs of the model per second, as a part of the peak


_KERNELS = 90  # of a block, forward and backward
_BACKWARD = 3  # passes of attention in training, as FLOPs are counted: backward is twice forward
_BYTES = {"fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2, "fp8": 1}
_CASTS = 5  # bytes for each element that is cast to fp8: read twice in 16 bits, written once
_UNPACKED = 4.5  # bytes for each weight that is unpacked from 4 bits, in 16 bits, and read again


def step_time(
    layout: Layout,
    facts: ModelFacts,
    activations: Activations,
    blocks: int,
    hardware: Hardware,
    efficiencies: Efficiencies,
) -> StepTime | None:
    """Return the time of a step; None if the FLOPs or a figure of the hardware are unknown."""
    config, efficiencies = layout.config, efficiencies.on(hardware)
    peak, usual = hardware.peak(config.precision.compute), hardware.peak(_usual(config))
    if facts.flops is None or not (peak and usual and hardware.memory_bandwidth):
        return None
    degrees, batch = layout.degrees, layout.batch
    divided = degrees.tp * degrees.cp * degrees.pp
    samples = batch.share / divided  # of a step, as if this rank had made them alone
    products_s, attention_s = _compute(layout, facts, hardware, efficiencies)
    compute = samples * (products_s + attention_s)
    traffic = efficiencies.fused if config.train.compile != "off" else efficiencies.traffic
    twice = config.train.activation_checkpointing != "none"  # the forward pass is made
    traffic *= 1.33 if twice else 1
    rate = hardware.memory_bandwidth * efficiencies.memory
    memory = samples * traffic * (activations.saved + activations.outside) / rate
    if config.train.lora.quantize:  # forward and backward, and again
        memory += (2 + twice) * batch.accumulate * facts.adapted * _UNPACKED / rate
    launches = _KERNELS * max(1, blocks) / degrees.pp * efficiencies.launch_s
    busy = max(compute + memory, launches * batch.accumulate)
    hidden = _between_layers(layout, facts, blocks, hardware)
    open_s = _inside_layers(layout, facts, blocks, hardware)
    if not math.isfinite(hidden + open_s):  # the bandwidth of a link is unknown
        return None
    moved, rate_of_states = 0.0, rate
    if config.parallel.fsdp.offload:
        moved = _moved(layout, facts) / efficiencies.host_link
        rate_of_states = efficiencies.host_memory
    once = hidden / max(1, blocks)  # the first gather, and the last reduction, have nothing to hide
    behind = min(hidden, efficiencies.overlap * busy)
    exposed = open_s + max(once, hidden - behind) + efficiencies.contention * behind
    waiting = 0.0
    if degrees.pp > 1:
        waiting = bubble(config.parallel.pipeline.schedule, degrees.pp, batch.accumulate)
    step = (busy + exposed + moved) / (1 - min(waiting, 0.95))
    step += _optimizer(layout, facts, rate_of_states)
    return StepTime(
        step_s=step,
        compute_s=compute,
        memory_s=memory,
        comm_s=hidden + open_s,
        exposed_comm_s=exposed,
        bubble=waiting,
        mfu=facts.flops.training * batch.global_size / (step * layout.ranks * peak),
    )


def _usual(config: Config) -> str:
    """Return the format of attention, and of products that precision.compute=fp8 leaves out."""
    return config.precision.compute.replace("fp8", "bf16")


def _compute(
    layout: Layout, facts: ModelFacts, hardware: Hardware, efficiencies: Efficiencies
) -> tuple[float, float]:
    """Return the seconds of products and of attention of a whole sample on one GPU."""
    assert facts.flops is not None
    degrees, flops, usual = layout.degrees, facts.flops, _usual(layout.config)
    in_fp8 = layout.config.precision.compute == "fp8"
    rate = hardware.memory_bandwidth or 1.0
    forward = sum(matrix.flops for matrix in facts.matrices)
    attention = max(0.0, flops.forward - forward)
    passes, over = (flops.training - _BACKWARD * attention) / max(1.0, forward), _BACKWARD
    if layout.config.train.activation_checkpointing == "full":
        passes += max(0.0, facts.again - attention) / max(1.0, forward)
        over += 1
    time = 0.0
    for matrix in facts.matrices:
        own = "fp8" if in_fp8 and matrix.fp8 else usual
        peak, part = hardware.peak(own) or 1.0, getattr(efficiencies, own, 1.0)
        # An expert gets tokens from all ranks of its group.
        together = layout.config.parallel.ep if matrix.number > 1 and not matrix.moved else 1
        positions = max(1.0, layout.batch.micro * matrix.positions * together / degrees.cp)
        wide, narrow = sorted((matrix.rows, matrix.columns), reverse=True)
        size = 3 / (degrees.tp / wide + 1 / narrow + 1 / positions)
        half = efficiencies.convolution if matrix.moved else efficiencies.half
        half *= peak * _BYTES[own] / rate
        product = matrix.flops * (size + half) / (peak * efficiencies.best * part * size)
        moved = matrix.moved * _BYTES[own] / (rate * efficiencies.memory)
        time += max(product, moved)
        if not matrix.channels_last and _BYTES[own] == 2:  # inputs and outputs are turned around
            time += 2 * moved
        if own == "fp8":  # inputs and gradients are read twice, for their largest value, and cast
            moved = _CASTS * (2 * matrix.columns + matrix.rows) * matrix.positions
            time += moved / (rate * efficiencies.memory * passes)
    # A causal kernel computes half of the square that is counted.
    counted = over * attention / (2 if facts.tokens else 1)
    return passes * time, counted / (efficiencies.attention * (hardware.peak(usual) or 1.0))


def _between_layers(layout: Layout, facts: ModelFacts, blocks: int, hardware: Hardware) -> float:
    """Return the seconds of gathering parameters and adding gradients, which can be hidden."""
    config, degrees, batch = layout.config, layout.degrees, layout.batch
    parallel, per_node, total = config.parallel, config.launch.tasks_per_node, 0.0
    size, reduced = computed_bytes(config.precision), reduced_bytes(config.precision)
    every = parallel.zero > 1 and parallel.sync != "last" and degrees.pp == 1
    gathers = 2 * batch.accumulate if parallel.zero == 3 else 1
    scatters = batch.accumulate if every else 1
    learnt = reduced * facts.trainable / max(1, facts.parameters)
    # A rank of expert parallel has its own experts, which it divides with every ep-th other rank.
    ep, experts = parallel.ep, facts.of_experts if parallel.ep > 1 else 0
    for whole, apart in ((facts.parameters - experts, 1), (experts / ep, ep)):
        own = whole / (degrees.tp * degrees.pp)
        shard, inner = max(1, shards(degrees, parallel) // apart), degrees.tp * apart
        link = link_of(hardware, per_node, inner, shard)
        total += _blocks_s(gathers, own * size, shard, link, blocks)
        total += _blocks_s(scatters, own * learnt, shard, link, blocks)
        replicas = degrees.dp * degrees.cp // (shard * apart)
        outer = link_of(hardware, per_node, inner * shard, replicas)
        total += _blocks_s(2, own * learnt / shard, replicas, outer, blocks)
    return total


def _inside_layers(layout: Layout, facts: ModelFacts, blocks: int, hardware: Hardware) -> float:
    """Return the seconds of what layers wait for: tensor, context, expert, pipeline parallel."""
    config, degrees, batch = layout.config, layout.degrees, layout.batch
    ep, per_node = config.parallel.ep, config.launch.tasks_per_node
    size = computed_bytes(config.precision)
    residual = batch.micro * facts.tokens * facts.width * size / degrees.cp
    passes = 3 if config.train.activation_checkpointing == "full" else 2
    times, total = passes * blocks / degrees.pp * batch.accumulate, 0.0
    if degrees.tp > 1:  # two gathers and two scatters of a block in each pass
        link = link_of(hardware, per_node, 1, degrees.tp)
        exposed = 0.5 if _overlaps(layout, hardware) else 1.0
        total += gather_s(residual, degrees.tp, link) * 4 * times * exposed
    if degrees.cp > 1:  # a gather of keys and values, and a scatter of their gradients
        link = link_of(hardware, per_node, degrees.tp, degrees.cp)
        keys = batch.micro * facts.tokens * facts.keys_values * size / degrees.tp
        total += gather_s(keys, degrees.cp, link) * times
    if ep > 1:  # tokens go to their experts and back, in each pass
        nodes = degrees.tp * ep // per_node  # of several, what leaves a node takes the time
        link, groups = (hardware.between, nodes) if nodes > 1 else (hardware.inside, ep)
        total += gather_s(residual * facts.per_token, groups, link) * 2 * times
    if degrees.pp > 1:
        outer = per_node if degrees.ranks > per_node else 1
        link = link_of(hardware, per_node, outer, degrees.pp)
        total += send_s(residual / degrees.tp, link) * batch.accumulate
    return total


def _overlaps(layout: Layout, hardware: Hardware) -> bool:
    """Return whether tensor parallel overlaps with products, which takes GPUs of one node."""
    config, degrees = layout.config, layout.degrees
    if not config.parallel.async_tp or hardware.name == "cpu":
        return False
    inside = degrees.tp <= config.launch.tasks_per_node
    return inside and not any(async_tp_problems(config, degrees))


def _moved(layout: Layout, facts: ModelFacts) -> float:
    """Return the bytes that offload sends between host and GPU in a step."""
    config, degrees = layout.config, layout.degrees
    stored = stored_bytes(config.precision)
    divided = degrees.tp * degrees.pp * shards(degrees, config.parallel)
    gathers = 2 * layout.batch.accumulate if config.parallel.zero == 3 else 1
    down = gathers * facts.parameters
    return stored * (down + layout.batch.accumulate * facts.trainable) / divided


def _blocks_s(times: float, nbytes: float, ranks: int, link: Link, blocks: int) -> float:
    return times * gather_s(nbytes / max(1, blocks), ranks, link) * max(1, blocks)


def _optimizer(layout: Layout, facts: ModelFacts, rate: float) -> float:
    """Return the seconds of clipping and the optimizer, which read and write all states."""
    config, degrees = layout.config, layout.degrees
    own = facts.trainable / (degrees.tp * degrees.pp * shards(degrees, config.parallel))
    tensors = 3 + 2 * (1 + optimizer_states(config.optimizer))
    return own * stored_bytes(config.precision) * tensors / rate


def gather_s(nbytes: float, ranks: int, link: Link) -> float:
    """Return the seconds of an all-gather or a reduce-scatter; infinite if the link is unknown."""
    if ranks <= 1 or nbytes == 0:
        return 0.0
    if link.bandwidth is None:
        return math.inf
    alpha = (link.latency_s or 0.0) * math.ceil(math.log2(ranks))
    return alpha + nbytes * (ranks - 1) / ranks / (link.bandwidth * LINK)


def send_s(nbytes: float, link: Link) -> float:
    """Return the seconds in which one rank sends to another; infinite if the link is unknown."""
    if link.bandwidth is None:
        return math.inf
    return (link.latency_s or 0.0) + nbytes / (link.bandwidth * LINK)


def link_of(hardware: Hardware, per_node: int, inner: int, ranks: int) -> Link:
    """Return the slowest link of a group of ranks."""
    if inner * ranks <= per_node:
        return hardware.inside
    # A ring enters each node once, and all ranks of the group in a node share the work of sending.
    together = max(1, per_node // inner)
    between, inside = hardware.between.bandwidth, hardware.inside.bandwidth
    if between is None or (together > 1 and inside is None):
        return Link(hardware.between.kind)
    rate = (
        between * together if inside is None or together == 1 else min(inside, between * together)
    )
    return Link(hardware.between.kind, rate, hardware.between.latency_s)
