"""The time of a collective operation by the alpha-beta model of its slowest link.

    all-gather, reduce-scatter   (n - 1) alpha + (n - 1) / n x bytes / beta
    all-reduce                   twice that

These are the costs of a ring (Thakur et al. 2005). NCCL takes trees where latency matters, so alpha
counts for log2(n) hops at most within a ring of nodes.
"""

from __future__ import annotations

import math

from hpctrain.hardware import Hardware, Link

_EFFICIENCY = 0.8  # of the bandwidth of a link that NCCL's large messages reach (assumption)


def gather_s(nbytes: float, ranks: int, link: Link) -> float | None:
    """Return the seconds of an all-gather or a reduce-scatter; None if the link is unknown."""
    if ranks == 1 or nbytes == 0:
        return 0.0
    if link.bandwidth is None:
        return None
    alpha = (link.latency_s or 0.0) * math.ceil(math.log2(ranks))
    return alpha + nbytes * (ranks - 1) / ranks / (link.bandwidth * _EFFICIENCY)


def send_s(nbytes: float, link: Link) -> float | None:
    """Return the seconds in which one rank sends to another; None if the link is unknown."""
    if link.bandwidth is None:
        return None
    return (link.latency_s or 0.0) + nbytes / (link.bandwidth * _EFFICIENCY)


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
