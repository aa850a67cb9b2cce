"""The figures of a benchmark: computed from step times, saved, and compared with earlier ones."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Self

import msgspec

from hpctrain.disk import write_atomically
from hpctrain.errors import ConfigError, DamageError, StorageError
from hpctrain.record import Finite, Record, Time, read

_CLOSE = 1.1  # a loader that is only so much faster than the steps holds them up now and then
_MUCH = 0.3  # communication that takes this part of a step by itself

Speed = Annotated[float, msgspec.Meta(gt=0, le=1.7e308)]


class Part(Record, frozen=True):
    """The figures of one part.

    Attributes:
        samples_per_s: Samples per second of all ranks, over all steps.
        p50_ms: Half of the steps took at most so long.
        p95_ms: 95% of the steps did.
        mb_per_s: 1e6 bytes per second of all ranks: of samples, or of gradients; None of a step.
        mfu_percent: Model FLOPs utilisation; None where hardware or model are unknown.
    """

    samples_per_s: Speed
    p50_ms: Finite
    p95_ms: Finite
    mb_per_s: Finite | None = None
    mfu_percent: Finite | None = None

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
        """Return the figures of some steps.

        Args:
            seconds: The times of the steps of each rank.
            samples: The samples of a step, of all ranks.
            step_bytes: The bytes of a step, of all ranks.
            step_flops: The floating-point operations of a step.
            peak: The peak of all devices in FLOP/s.
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


class Facts(Record, frozen=True):
    """What may differ between two benchmarks that are compared.

    Attributes:
        rank_s: Seconds of a step of each rank by itself; empty if they were not measured.
    """

    time: Time = 0.0
    host: str = ""
    torch: str = ""
    hosts: tuple[str, ...] = ()
    rank_s: tuple[Speed, ...] = ()


class Figures(Record, frozen=True):
    """A benchmark.

    Attributes:
        setup: What must be the same for a comparison, by name.
        parts: The figures by part: `data`, `compute`, `communication`, `whole`.
        facts: What may differ.
    """

    setup: dict[str, Any]
    parts: dict[str, Part] = msgspec.field(default_factory=dict)
    facts: Facts = Facts()

    def save(self, path: Path) -> None:
        """Write the file. StorageError: it cannot be written."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            text = msgspec.json.format(msgspec.json.encode(self), indent=1).decode()
            write_atomically(path, text + "\n")
        except OSError as error:
            raise StorageError(f"--save {path}: {error.strerror}") from error

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a file of `--save`. ConfigError: it is none."""
        try:
            return read(cls, path, parts=0)
        except FileNotFoundError as error:
            raise ConfigError(f"--against {path}: {error.strerror}") from None
        except DamageError as error:
            raise ConfigError(f"--against {path}: not a file of bench --save ({error})") from None

    def check_comparable(self, before: Figures, path: Path) -> None:
        """Check that two benchmarks measure the same.

        Raises:
            ConfigError: They do not; the message names what differs.
        """
        names = self.setup.keys() | before.setup.keys()
        differ = [
            f"{name} was {before.setup.get(name)} and is {self.setup.get(name)}"
            for name in sorted(names)
            if self.setup.get(name) != before.setup.get(name)
        ]
        if differ:
            raise ConfigError(f"--against {path}: another benchmark: {'; '.join(differ)}")

    def slower(self, before: Figures, tolerance: float) -> list[str]:
        """Return a sentence for each part that is slower than before.

        Args:
            before: The earlier benchmark.
            tolerance: Percent that do not count.
        """
        found = []
        for name, part in self.parts.items():
            if (old := before.parts.get(name)) is None:
                continue
            change = 100 * (part.samples_per_s / old.samples_per_s - 1)
            if change < -tolerance:
                found.append(
                    f"{name}: {part.samples_per_s:,.0f} samples/s, {-change:.0f}% less than "
                    f"{old.samples_per_s:,.0f}"
                )
        return found

    def limit(self) -> str:
        """Return what limits the training, in one sentence; "" if too little was measured."""
        data, compute = self.parts.get("data"), self.parts.get("compute")
        sent = self.parts.get("communication")
        if compute is None:
            return ""
        if data is not None and data.samples_per_s < _CLOSE * compute.samples_per_s:
            ratio = data.samples_per_s / compute.samples_per_s
            return (
                f"The loader limits: it brings {ratio:.2f} times what the steps take. Try "
                "data.threads, data.workers, data.stage=node, or a smaller image size."
            )
        if sent is not None and sent.p50_ms > _MUCH * compute.p50_ms:
            share = sent.p50_ms / compute.p50_ms
            return (
                f"Communication may limit: by itself it takes {share:.0%} of a step, of which the "
                "backward pass covers a part. Try train.micro_batch_size with a larger global "
                "batch, or gradient compression (parallel.ddp)."
            )
        return "Computing limits: the loader and the links have room."
