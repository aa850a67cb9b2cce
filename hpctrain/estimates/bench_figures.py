"""The figures of a benchmark, computed from step times, and what they say."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

_CLOSE = 1.1  # a loader that is only so much faster than the steps holds them up now and then
_MUCH = 0.3  # communication that takes this part of a step by itself


@dataclass(frozen=True)
class Part:
    """The figures of one part."""

    samples_per_s: float  # of all ranks, over all steps
    p50_ms: float
    p95_ms: float
    mb_per_s: float | None = None  # 1e6 bytes/s of all ranks: samples or gradients; None of a step
    mfu_percent: float | None = None  # None where hardware or model are unknown

    @classmethod
    def of(
        cls,
        seconds: Sequence[Sequence[float]],
        samples: int,
        *,
        step_bytes: float | None = None,
        step_flops: float | None = None,
        peak: float | None = None,
    ) -> Self:
        """Return the figures of some steps, from the seconds of the steps of each rank.

        `samples`, `step_bytes` and `step_flops` are those of a step of all ranks; `peak` is that of
        all devices in FLOP/s.
        """
        # The ranks wait for the slowest one.
        mean = max(sum(own) / len(own) for own in seconds)
        steps = [max(step) for step in zip(*seconds, strict=True)]
        return cls(
            samples / mean,
            1000 * quantile(steps, 0.5),
            1000 * quantile(steps, 0.95),
            None if step_bytes is None else step_bytes / mean / 1e6,
            None if not step_flops or not peak else 100 * step_flops / mean / peak,
        )


def quantile(values: Sequence[float], part: float) -> float:
    """Return the smallest value that is not less than this part of the values."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(part * len(ordered)) - 1)]


@dataclass(frozen=True)
class Figures:
    """A benchmark."""

    setup: dict[str, Any]  # what was measured
    # `data`, `compute`, `communication`, `whole`.
    parts: dict[str, Part] = field(default_factory=dict)
    torch: str = ""

    def limit(self, cures: Mapping[str, str]) -> str:
        """Return what limits the training, with its cure; "" if too little was measured."""
        data, compute, sent = map(self.parts.get, ("data", "compute", "communication"))
        if compute is None:
            return ""
        if data is not None and data.samples_per_s < _CLOSE * compute.samples_per_s:
            ratio = data.samples_per_s / compute.samples_per_s
            text = f"The loader limits: it brings {ratio:.2f} times what the steps take"
            return ": ".join(filter(None, (text, cures.get("data")))) + "."
        if sent is not None and sent.p50_ms > _MUCH * compute.p50_ms:
            text = (
                f"Communication may limit: by itself it takes {sent.p50_ms / compute.p50_ms:.0%} "
                "of a step, of which the backward pass covers a part"
            )
            return ": ".join(filter(None, (text, cures.get("communication")))) + "."
        return "Computing limits."
