"""The figures of a benchmark: computed from step times, saved, and compared with earlier ones."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

import msgspec

from hpctrain.disk import write_atomically
from hpctrain.errors import ConfigError, DamageError, StorageError
from hpctrain.record import Finite, Record, read, written

_CLOSE = 1.1  # a loader that is only so much faster than the steps holds them up now and then
_MUCH = 0.3  # communication that takes this part of a step by itself

Speed = Annotated[float, msgspec.Meta(gt=0, le=1.7e308)]


class Part(Record, frozen=True):
    """The figures of one part."""

    samples_per_s: Speed  # of all ranks, over all steps
    p50_ms: Finite
    p95_ms: Finite
    mb_per_s: Finite | None = None  # 1e6 bytes/s of all ranks: samples or gradients; None of a step
    mfu_percent: Finite | None = None  # None where hardware or model are unknown

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


class Figures(Record, frozen=True):
    """A benchmark."""

    VERSION: ClassVar[int] = 1

    setup: dict[str, Any]  # what must be the same for a comparison
    # `data`, `compute`, `communication`, `whole`.
    parts: dict[str, Part] = msgspec.field(default_factory=dict)
    torch: str = ""

    def save(self, path: Path) -> None:
        """Write the file. StorageError: it cannot be written."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, written(self))
        except OSError as error:
            raise StorageError(f"--save {path}: {error.strerror}") from error

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a file of `--save`. ConfigError: it is none."""
        try:
            return read(cls, path, parts=0)
        except OSError as error:
            raise ConfigError(f"--against {path}: {error.strerror}") from None
        except DamageError as error:
            raise ConfigError(f"--against {path}: not a file of bench --save ({error})") from None

    def check_comparable(self, before: Figures, path: Path) -> None:
        """Raise a ConfigError that names what differs, unless both measure the same."""
        old, new = before.setup, self.setup
        differ = [
            f"{name} was {old.get(name)} and is {new.get(name)}"
            for name in sorted(old.keys() | new.keys())
            if old.get(name) != new.get(name)
        ]
        if differ:
            raise ConfigError(f"--against {path}: another benchmark: {'; '.join(differ)}")

    def slower(self, before: Figures, tolerance: float) -> list[str]:
        """Return a sentence for each part that is slower than before."""
        found = []
        for name in (name for name in self.parts if name in before.parts):
            now, old = self.parts[name].samples_per_s, before.parts[name].samples_per_s
            if (change := 100 * (now / old - 1)) < -tolerance:
                found.append(f"{name}: {now:,.0f} samples/s, {-change:.0f}% less than {old:,.0f}")
        return found

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
