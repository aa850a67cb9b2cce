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
harmonic mean of its three sizes. The constants are calibrated on a part of the runs of
docs/published.md; the others judge.
"""

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Self

from hpctrain.base.units import ELEMENT_BYTES
from hpctrain.config.rules.degrees import bubble
from hpctrain.insight.estimates.hardware import Hardware, Link
from hpctrain.insight.flops.flops import Flops
from hpctrain.insight.plan.inspecting.activations import Activations
from hpctrain.insight.plan.inspecting.model_facts import Matrix, ModelFacts
from hpctrain.insight.plan.layouts import Layout

_LINK = 0.8  # of the bandwidth that NCCL's large messages reach (assumption)


@dataclass(frozen=True)
class Efficiencies:
    """What a step reaches of the figures of a data sheet."""

    best: float = 0.75  # of the peak: what the largest products reach; between A100 and H100
    # The part of the time of reading operands that computing does not hide: a product of size s
    # reaches s / (s + half x peak / bandwidth) of `best`.
    half: float = 0.06
    fp8: float = 0.9  # of `best`: what a product in fp8 reaches of its peak beside one in 16 bits
    tf32: float = 0.55  # of `best`, likewise
    convolution: float = 0.8  # `half` of convolutions
    attention: float = 0.35  # of the peak (flash kernel)
    traffic: float = 8.0  # how often the bytes of the activations go through the memory in a step
    fused: float = 3.0  # the same, where torch.compile fuses
    memory: float = 0.8  # of the HBM bandwidth
    overlap: float = 0.9  # of the computing time, behind which communication can hide
    contention: float = 0.65  # of hidden communication: so much it slows the computing beside it
    launch_s: float = 6e-6  # in which the CPU starts one operation
    host_link: float = 20e9  # bytes/s between GPU and host
    host_memory: float = 20e9  # bytes/s of the memory of the host, for each GPU

    def on(self, hardware: Hardware) -> Self:
        """Return them with what the hardware says itself."""
        link = hardware.host.bandwidth
        return replace(
            self,
            best=hardware.matmul_efficiency or self.best,
            attention=hardware.attention_efficiency or self.attention,
            host_link=self.host_link if link is None else link * _LINK,
        )

    def __str__(self) -> str:
        return ", ".join(f"{name} {value:g}" for name, value in vars(self).items())


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step."""

    step_s: float
    compute_s: float  # matrix products and attention
    comm_s: float  # all of a rank
    exposed_comm_s: float  # the part that is not hidden behind computing
    bubble: float  # the part of the step in which a rank of a pipeline waits
    mfu: float  # FLOPs of the model per second, as a part of the peak


_KERNELS = 90  # of a block, forward and backward
_BACKWARD = 3  # passes of attention in training, as FLOPs are counted: backward is twice forward
_CASTS = 5  # bytes for each element that is cast to fp8: read twice in 16 bits, written once
_UNPACKED = 4.5  # bytes for each weight that is unpacked from 4 bits, in 16 bits, and read again


def step_time(
    layout: Layout,
    facts: ModelFacts,
    activations: Activations,
    hardware: Hardware,
    efficiencies: Efficiencies,
) -> StepTime | None:
    """Return the time of a step; None if the FLOPs or a figure of the hardware are unknown."""
    return _Step(layout, facts, hardware, efficiencies).time(activations)


class _Step:
    """The parts of a step of one layout; all methods return seconds."""

    def __init__(
        self, layout: Layout, facts: ModelFacts, hardware: Hardware, efficiencies: Efficiencies
    ) -> None:
        self.layout, self.facts, self.hardware = layout, facts, hardware
        self.training, self.degrees, self.batch = layout.training, layout.degrees, layout.batch
        self.parallel = self.training.parallel
        self.efficiencies, self.compute = efficiencies.on(hardware), self.training.precision.compute
        # Attention, and the products that precision.compute=fp8 leaves out, have this format.
        self.usual = self.compute.replace("fp8", "bf16")
        self.per_node, self.blocks = self.training.launch.tasks_per_node, max(1, facts.blocks)
        self.stored = ELEMENT_BYTES[self.training.precision.params]
        self.link = partial(link_of, hardware, self.per_node)
        self.rate = (hardware.memory_bandwidth or 0.0) * self.efficiencies.memory
        self.divided = self.degrees.tp * self.degrees.pp * self.degrees.shards(self.parallel)

    def time(self, activations: Activations) -> StepTime | None:
        """Return all of it; None if a figure is unknown."""
        training, degrees, batch, facts = self.training, self.degrees, self.batch, self.facts
        peak, constants = self.hardware.peak(self.compute), self.efficiencies
        if facts.flops is None or not (peak and self.hardware.peak(self.usual) and self.rate):
            return None
        # Those of a step, as if this rank had made them alone.
        samples = batch.share / (degrees.tp * degrees.cp * degrees.pp)
        compute = samples * self._compute(facts.flops)
        traffic = constants.fused if training.train.compile != "off" else constants.traffic
        twice = training.train.activation_checkpointing != "none"  # the forward pass is made
        traffic *= 1.33 if twice else 1
        memory = samples * traffic * (activations.saved + activations.outside) / self.rate
        if training.train.lora.quantize:  # forward and backward, and again
            memory += (2 + twice) * batch.accumulate * facts.adapted * _UNPACKED / self.rate
        launches = _KERNELS * self.blocks / degrees.pp * constants.launch_s
        busy = max(compute + memory, launches * batch.accumulate)
        hidden, open_s = self._between_layers(), self._inside_layers()
        if not math.isfinite(hidden + open_s):  # the bandwidth of a link is unknown
            return None
        moved, rate_of_states = 0.0, self.rate
        if self.parallel.fsdp.offload:  # between host and GPU
            down = (2 * batch.accumulate if self.parallel.zero == 3 else 1) * facts.parameters
            sent = self.stored * (down + batch.accumulate * facts.trainable)
            moved = sent / self.divided / constants.host_link
            rate_of_states = constants.host_memory
        # The first gather, and the last reduction, have nothing to hide behind.
        once, behind = hidden / self.blocks, min(hidden, constants.overlap * busy)
        exposed = open_s + max(once, hidden - behind) + constants.contention * behind
        schedule, pp = self.parallel.pipeline.schedule, degrees.pp
        waiting = bubble(schedule, pp, batch.accumulate) if pp > 1 else 0.0
        step = (busy + exposed + moved) / (1 - min(waiting, 0.95))
        # Clipping and the optimizer read and write all states.
        tensors = 3 + 2 * (1 + training.optimizer.states)
        states = facts.trainable / self.divided * self.stored * tensors
        step += states / rate_of_states
        mfu = facts.flops.training * batch.global_size / (step * self.layout.ranks * peak)
        return StepTime(step, compute, hidden + open_s, exposed, waiting, mfu)

    def _compute(self, flops: Flops) -> float:
        """Return those of the products and of attention of a whole sample on one GPU."""
        facts, constants = self.facts, self.efficiencies
        forward = sum(matrix.flops for matrix in facts.matrices)
        attention = max(0.0, flops.forward - forward)
        passes, over = (flops.training - _BACKWARD * attention) / max(1.0, forward), _BACKWARD
        if self.training.train.activation_checkpointing == "full":
            passes += max(0.0, facts.again - attention) / max(1.0, forward)
            over += 1
        time = sum(self._product(matrix, passes) for matrix in facts.matrices)
        # A causal kernel computes half of the square that is counted.
        counted = over * attention / (2 if facts.tokens else 1)
        peak = self.hardware.peak(self.usual) or 1.0
        return passes * time + counted / (constants.attention * peak)

    def _product(self, matrix: Matrix, passes: float) -> float:
        """Return those of a sample and one pass, with a part of the casts of all passes."""
        degrees, constants = self.degrees, self.efficiencies
        own = "fp8" if self.compute == "fp8" and matrix.fp8 else self.usual
        size = 1 if own == "fp8" else ELEMENT_BYTES[own]
        peak, part = self.hardware.peak(own) or 1.0, getattr(constants, own, 1.0)
        # An expert gets tokens from all ranks of its group.
        together = self.parallel.ep if matrix.number > 1 and not matrix.moved else 1
        positions = max(1.0, self.batch.micro * matrix.positions * together / degrees.cp)
        wide, narrow = sorted((matrix.rows, matrix.columns), reverse=True)
        mean = 3 / (degrees.tp / wide + 1 / narrow + 1 / positions)
        half = constants.convolution if matrix.moved else constants.half
        half *= peak * size / (self.hardware.memory_bandwidth or 1.0)
        product = matrix.flops * (mean + half) / (peak * constants.best * part * mean)
        moved = matrix.moved * size / self.rate
        time = max(product, moved)
        if not matrix.channels_last and size == 2:  # inputs and outputs are turned around
            time += 2 * moved
        if own == "fp8":  # inputs and gradients are read twice, for their largest value, and cast
            cast = _CASTS * (2 * matrix.columns + matrix.rows) * matrix.positions
            time += cast / (self.rate * passes)
        return time

    def _between_layers(self) -> float:
        """Return those of gathering parameters and adding gradients, which can be hidden."""
        parallel, degrees, facts = self.parallel, self.degrees, self.facts
        precision, total = self.training.precision, 0.0
        every = parallel.zero > 1 and parallel.sync != "last" and degrees.pp == 1
        gathers = 2 * self.batch.accumulate if parallel.zero == 3 else 1
        scatters = self.batch.accumulate if every else 1
        size = ELEMENT_BYTES[precision.compute]
        reduced = ELEMENT_BYTES[precision.reduce or precision.params]
        learnt = reduced * facts.trainable / max(1, facts.parameters)
        # A rank of expert parallel has its own experts, divided with every ep-th other rank.
        ep, experts = parallel.ep, facts.of_experts if parallel.ep > 1 else 0
        for whole, apart in ((facts.parameters - experts, 1), (experts / ep, ep)):
            own = whole / (degrees.tp * degrees.pp)
            shard, inner = max(1, degrees.shards(parallel) // apart), degrees.tp * apart
            link = self.link(inner, shard)
            total += self._by_block(gathers, own * size, shard, link)
            total += self._by_block(scatters, own * learnt, shard, link)
            replicas = degrees.dp * degrees.cp // (shard * apart)
            outer = self.link(inner * shard, replicas)
            total += self._by_block(2, own * learnt / shard, replicas, outer)
        return total

    def _by_block(self, times: float, nbytes: float, ranks: int, link: Link) -> float:
        return times * gather_s(nbytes / self.blocks, ranks, link) * self.blocks

    def _inside_layers(self) -> float:
        """Return those that layers wait for: tensor, context, expert, pipeline parallel."""
        training, degrees, batch, facts = self.training, self.degrees, self.batch, self.facts
        ep, size = self.parallel.ep, ELEMENT_BYTES[self.compute]
        residual = batch.micro * facts.tokens * facts.width * size / degrees.cp
        passes = 3 if training.train.activation_checkpointing == "full" else 2
        times, total = passes * facts.blocks / degrees.pp * batch.accumulate, 0.0
        if degrees.tp > 1:  # two gathers and two scatters of a block in each pass
            total += gather_s(residual, degrees.tp, self.link(1, degrees.tp)) * 4 * times
        if degrees.cp > 1:  # a gather of keys and values, and a scatter of their gradients
            keys = batch.micro * facts.tokens * facts.keys_values * size / degrees.tp
            total += gather_s(keys, degrees.cp, self.link(degrees.tp, degrees.cp)) * times
        if ep > 1:  # tokens go to their experts and back, in each pass
            link, groups = self.hardware.inside, ep
            if (nodes := degrees.tp * ep // self.per_node) > 1:  # what leaves a node takes the time
                link, groups = self.hardware.between, nodes
            total += gather_s(residual * facts.per_token, groups, link) * 2 * times
        if degrees.pp > 1:
            link = self.link(self.per_node if degrees.ranks > self.per_node else 1, degrees.pp)
            # Half of what two ranks gather goes from one to the other.
            total += gather_s(2 * residual / degrees.tp, 2, link) * batch.accumulate
        return total


def gather_s(nbytes: float, ranks: int, link: Link) -> float:
    """Return the seconds of an all-gather or a reduce-scatter; infinite if the link is unknown."""
    if ranks <= 1 or nbytes == 0:
        return 0.0
    if link.bandwidth is None:
        return math.inf
    alpha = (link.latency_s or 0.0) * math.ceil(math.log2(ranks))
    return alpha + nbytes * (ranks - 1) / ranks / (link.bandwidth * _LINK)


def link_of(hardware: Hardware, per_node: int, inner: int, ranks: int) -> Link:
    """Return the slowest link of a group of ranks."""
    if inner * ranks <= per_node:
        return hardware.inside
    # A ring enters each node once, and all ranks of the group in a node share the work of sending.
    together = max(1, per_node // inner)
    between, inside = hardware.between, hardware.inside.bandwidth if together > 1 else math.inf
    if between.bandwidth is None or inside is None:
        return Link(between.kind)
    return Link(between.kind, min(inside, between.bandwidth * together), between.latency_s)
