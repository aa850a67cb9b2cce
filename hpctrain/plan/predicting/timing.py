"""The time of a step: an estimate from a few stated efficiencies.

    products / (peak x efficiency)  ──┐
    attention, half of its square   ──┤
    bytes / HBM bandwidth           ──┼── / (1 - bubble) ── + optimizer ── step
    collectives that are not hidden ──┘

The collectives follow the alpha-beta model of their slowest link, as a ring (Thakur et al. 2005):

    all-gather, reduce-scatter   (n - 1) alpha + (n - 1) / n x bytes / beta
    all-reduce                   twice that

NCCL takes trees where latency matters, so alpha counts for log2(n) hops at most.

The efficiency of a matrix product grows with its size: `best` x s / (s + HALF), where s is the
harmonic mean of its three sizes. The constants are calibrated on the runs that docs/plan.md names.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from hpctrain.config.rules.combinations import async_tp_problems
from hpctrain.config.rules.pipeline_schedule import bubble
from hpctrain.estimates.optimizer_states import optimizer_states
from hpctrain.hardware import Hardware, Link
from hpctrain.plan.inspecting.activations import Activations
from hpctrain.plan.inspecting.model_facts import ModelFacts
from hpctrain.plan.layouts import Layout
from hpctrain.plan.memory import computed_bytes, reduced_bytes, shards, stored_bytes

_LINK_EFFICIENCY = 0.8  # of the bandwidth that NCCL's large messages reach (assumption)


@dataclass(frozen=True)
class Efficiencies:
    """What a step reaches of the figures of a data sheet."""

    # The part of the peak that the largest products reach; None takes that of the hardware.
    best: float | None = None
    half: float = 32.0  # the size at which a product reaches half of `best`
    attention: float = 0.35  # of the peak, where the hardware does not say (flash kernel)
    traffic: float = 8.0  # how often the bytes of the activations go through the memory in a step
    fused: float = 3.0  # the same, where torch.compile fuses
    memory: float = 0.8  # of the HBM bandwidth
    overlap: float = 0.9  # of the computing time, behind which communication can hide
    launch_s: float = 6e-6  # in which the CPU starts one operation
    host_link: float = 20e9  # bytes/s between GPU and host, where the hardware does not say
    host_memory: float = 20e9  # bytes/s of the memory of the host, for each GPU


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
_BEST = 0.6  # where the hardware does not say


def step_time(
    layout: Layout,
    facts: ModelFacts,
    activations: Activations,
    blocks: int,
    hardware: Hardware,
    efficiencies: Efficiencies,
) -> StepTime | None:
    """Return the time of a step; None if the FLOPs or a figure of the hardware are unknown."""
    peak, config = hardware.peak(layout.config.precision.compute), layout.config
    if facts.flops is None or peak is None or hardware.memory_bandwidth is None:
        return None
    degrees, batch = layout.degrees, layout.batch
    divided = degrees.tp * degrees.cp * degrees.pp
    samples = batch.share / divided  # of a step, as if this rank had made them alone
    products_s, attention_s = _compute(layout, facts, hardware, peak, efficiencies)
    compute = samples * (products_s + attention_s)
    traffic = efficiencies.fused if config.train.compile != "off" else efficiencies.traffic
    if config.train.activation_checkpointing != "none":
        traffic *= 1.33  # the forward pass is made twice
    rate = hardware.memory_bandwidth * efficiencies.memory
    memory = samples * traffic * activations.kept / rate
    micro_batches = batch.accumulate
    launches = _KERNELS * max(1, blocks) / degrees.pp * efficiencies.launch_s
    busy = max(compute + memory, launches * micro_batches)
    hidden, open_s = _communication(layout, facts, blocks, hardware)
    if hidden is None or open_s is None:
        return None
    moved, rate_of_states = 0.0, rate
    if config.parallel.fsdp.offload:
        moved = _moved(layout, facts) / host_rate(hardware, efficiencies)
        rate_of_states = efficiencies.host_memory
    once = hidden / max(1, blocks)  # the first gather, and the last reduction, have nothing to hide
    exposed = open_s + max(once, hidden - efficiencies.overlap * busy)
    waiting = 0.0
    if degrees.pp > 1:
        waiting = bubble(config.parallel.pipeline.schedule, degrees.pp, micro_batches)
    step = (busy + exposed + moved) / (1 - min(waiting, 0.95))
    step += _optimizer(layout, facts, rate_of_states)
    model_flops = facts.flops.training * batch.global_size
    return StepTime(
        step_s=step,
        compute_s=compute,
        memory_s=memory,
        comm_s=hidden + open_s,
        exposed_comm_s=exposed,
        bubble=waiting,
        mfu=model_flops / (step * layout.ranks * peak),
    )


def best_of(hardware: Hardware) -> float:
    """Return the part of the peak that the largest products of a GPU reach."""
    return hardware.matmul_efficiency or _BEST


def _compute(
    layout: Layout, facts: ModelFacts, hardware: Hardware, peak: float, efficiencies: Efficiencies
) -> tuple[float, float]:
    """Return the seconds of products and of attention of a whole sample on one GPU."""
    assert facts.flops is not None
    degrees, batch, flops = layout.degrees, layout.batch, facts.flops
    multiplied = sum(rows * columns for rows, columns in facts.matrices)
    multiplied = min(multiplied, facts.active)
    products, attention = float(flops.training), 0.0
    if facts.tokens:
        products = min(products, 6.0 * multiplied * facts.tokens)
        attention = flops.training - products
    full = layout.config.train.activation_checkpointing == "full"
    again = 4 / 3 if full else 1.0
    best = efficiencies.best or best_of(hardware)
    positions = batch.micro * (facts.tokens or 64) / degrees.cp
    time = 0.0
    for rows, columns in facts.matrices:
        size = 3 / (degrees.tp / max(rows, columns) + 1 / min(rows, columns) + 1 / positions)
        share = rows * columns / max(1, multiplied)
        time += share / (best * size / (size + efficiencies.half))
    # A causal kernel computes half of the square that is counted.
    reached = hardware.attention_efficiency or efficiencies.attention
    of_attention = attention / 2 * again / (peak * reached)
    return products * again * time / peak, of_attention


def _communication(
    layout: Layout, facts: ModelFacts, blocks: int, hardware: Hardware
) -> tuple[float | None, float | None]:
    """Return the seconds of what can hide behind computing, and of what cannot."""
    config, degrees, batch = layout.config, layout.degrees, layout.batch
    parallel, per_node = config.parallel, config.launch.tasks_per_node
    size, reduced = computed_bytes(config.precision), reduced_bytes(config.precision)
    # With expert parallel, a rank gathers only its own experts.
    whole = facts.parameters - facts.of_experts * (1 - 1 / parallel.ep)
    own = whole / (degrees.tp * degrees.pp)
    parts: list[float | None] = []
    shard = shards(degrees, parallel)
    link = link_of(hardware, per_node, degrees.tp, shard)
    if shard > 1:
        every = parallel.zero > 1 and parallel.sync != "last" and degrees.pp == 1
        gathers = 2 * batch.accumulate if parallel.zero == 3 else 1
        scatters = batch.accumulate if every else 1
        parts.append(_blocks_s(gathers, own * size, shard, link, blocks))
        parts.append(_blocks_s(scatters, own * reduced, shard, link, blocks))
    replicas = degrees.dp * degrees.cp // shard
    if replicas > 1:
        outer = link_of(hardware, per_node, degrees.tp * shard, replicas)
        parts.append(_blocks_s(2, own * reduced / shard, replicas, outer, blocks))
    hidden = None if None in parts else sum(part for part in parts if part is not None)
    open_s = _inside_layers(layout, facts, blocks, hardware, size)
    return hidden, open_s


def _inside_layers(
    layout: Layout, facts: ModelFacts, blocks: int, hardware: Hardware, size: int
) -> float | None:
    """Return the seconds of what layers wait for: tensor, context, expert, pipeline parallel."""
    config, degrees, batch = layout.config, layout.degrees, layout.batch
    parallel = config.parallel
    per_node, own = config.launch.tasks_per_node, blocks / degrees.pp
    residual = batch.micro * facts.tokens * facts.width * size / degrees.cp
    passes = 3 if config.train.activation_checkpointing == "full" else 2
    total: float | None = 0.0
    if degrees.tp > 1:  # two gathers and two scatters of a block in each pass
        link = link_of(hardware, per_node, 1, degrees.tp)
        one = gather_s(residual, degrees.tp, link)
        exposed = 0.5 if _overlaps(layout, hardware) else 1.0
        total = _plus(total, one, 4 * passes * own * batch.accumulate * exposed)
    if degrees.cp > 1:  # a gather of keys and values, and a scatter of their gradients
        link = link_of(hardware, per_node, degrees.tp, degrees.cp)
        keys = batch.micro * facts.tokens * facts.keys_values * size / degrees.tp
        one = gather_s(keys, degrees.cp, link)
        total = _plus(total, one, passes * own * batch.accumulate)
    if parallel.ep > 1:  # tokens go to their experts and back, in each pass
        link = link_of(hardware, per_node, degrees.tp, parallel.ep)
        one = gather_s(residual * facts.per_token, parallel.ep, link)
        total = _plus(total, one, 2 * passes * own * batch.accumulate)
    if degrees.pp > 1:
        outer = per_node if degrees.ranks > per_node else 1
        link = link_of(hardware, per_node, outer, degrees.pp)
        total = _plus(total, send_s(residual / degrees.tp, link), 2 * batch.accumulate * 0.5)
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


def host_rate(hardware: Hardware, efficiencies: Efficiencies) -> float:
    """Return the bytes/s that offload moves between a GPU and the memory of its host."""
    link = hardware.host.bandwidth
    return efficiencies.host_link if link is None else link * _LINK_EFFICIENCY


def _plus(total: float | None, one: float | None, times: float) -> float | None:
    return None if total is None or one is None else total + times * one


def _blocks_s(times: float, nbytes: float, ranks: int, link: Link, blocks: int) -> float | None:
    one = gather_s(nbytes / max(1, blocks), ranks, link)
    return None if one is None else times * one * max(1, blocks)


def _optimizer(layout: Layout, facts: ModelFacts, rate: float) -> float:
    """Return the seconds of clipping and the optimizer, which read and write all states."""
    config, degrees = layout.config, layout.degrees
    own = facts.trainable / (degrees.tp * degrees.pp * shards(degrees, config.parallel))
    tensors = 3 + 2 * (1 + optimizer_states(config.optimizer))
    return own * stored_bytes(config.precision) * tensors / rate


def gather_s(nbytes: float, ranks: int, link: Link) -> float | None:
    """Return the seconds of an all-gather or a reduce-scatter; None if the link is unknown."""
    if ranks == 1 or nbytes == 0:
        return 0.0
    if link.bandwidth is None:
        return None
    alpha = (link.latency_s or 0.0) * math.ceil(math.log2(ranks))
    return alpha + nbytes * (ranks - 1) / ranks / (link.bandwidth * _LINK_EFFICIENCY)


def send_s(nbytes: float, link: Link) -> float | None:
    """Return the seconds in which one rank sends to another; None if the link is unknown."""
    if link.bandwidth is None:
        return None
    return (link.latency_s or 0.0) + nbytes / (link.bandwidth * _LINK_EFFICIENCY)


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
