"""The figures of a benchmark: computed from step times, saved, and compared with earlier ones."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

import msgspec

from hpctrain.disk import write_atomically
from hpctrain.errors import ConfigError, DamageError, StorageError
from hpctrain.record import Finite, Record, Time, read, written
from hpctrain.rendezvous.ranks import host_of

_CLOSE = 1.1  # a loader that is only so much faster than the steps holds them up now and then
_LITTLE = 0.1  # communication that takes less of a step by itself does not hold it up
_MUCH = 0.3  # communication that takes this part of a step by itself
_MOST = 0.5  # of a step that is neither forward nor backward
_UNEQUAL = 1.1  # a rank that is so much slower than another holds it up
_UNSTEADY = 1.3  # the 95th percentile of the steps against their median

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


class Facts(Record, frozen=True):
    """What may differ between two benchmarks that are compared."""

    time: Time = 0.0
    host: str = ""
    torch: str = ""
    hosts: tuple[str, ...] = ()
    # Seconds of a step of each rank by itself; empty if not measured.
    rank_s: tuple[Speed, ...] = ()
    cures: dict[str, str] = msgspec.field(default_factory=dict)  # against each limit


class Figures(Record, frozen=True):
    """A benchmark."""

    VERSION: ClassVar[int] = 1

    setup: dict[str, Any]  # what must be the same for a comparison
    # `data`, `compute`, `communication`, `whole`.
    parts: dict[str, Part] = msgspec.field(default_factory=dict)
    facts: Facts = Facts()

    def save(self, path: Path) -> None:
        """Write the file. StorageError: it cannot be written."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, written(self))
        except OSError as error:
            raise StorageError(f"--save {path}: {error.strerror}") from error

    @classmethod
    def load(cls, path: Path, asked: str = "--against ") -> Self:
        """Read a file of `--save`, for which a text has asked. ConfigError: it is none."""
        try:
            return read(cls, path, parts=0)
        except OSError as error:
            raise ConfigError(f"{asked}{path}: {error.strerror}") from None
        except DamageError as error:
            raise ConfigError(f"{asked}{path}: not a file of bench --save ({error})") from None

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

    def limit(self) -> str:
        """Return what limits the training, in one sentence; "" if too little was measured."""
        data, compute, sent = map(self.parts.get, ("data", "compute", "communication"))
        if compute is None:
            return ""
        if data is not None and data.samples_per_s < _CLOSE * compute.samples_per_s:
            ratio = data.samples_per_s / compute.samples_per_s
            text = f"The loader limits: it brings {ratio:.2f} times what the steps take."
            return self._cured(text, "data")
        # In this time the slowest rank computes its share of a step alone.
        rank_s = self.facts.rank_s
        rows = int(self.setup["train.global_batch_size"]) / len(rank_s) if rank_s else 0.0
        alone = 1000 * rows * max(rank_s, default=0.0)
        if sent is not None and alone and alone < (1 - _MOST) * compute.p50_ms:
            text = (
                f"Communication limits: a step takes {compute.p50_ms:.0f} ms, and its forward and "
                f"backward passes alone {alone:.0f} ms."
            )
            if sent.p50_ms < _LITTLE * compute.p50_ms:
                return (
                    f"Neither computing nor communication limits: a step takes {compute.p50_ms:.3g}"
                    f" ms, its forward and backward passes alone {alone:.3g} ms, and what it sends "
                    f"{sent.p50_ms:.2g} ms ({sent.p50_ms / compute.p50_ms:.0%}). The rest is the "
                    "optimizer, the host, or many small messages of divided parameters."
                )
            return self._cured(text, "communication")
        if sent is not None and sent.p50_ms > _MUCH * compute.p50_ms:
            text = (
                f"Communication may limit: by itself it takes {sent.p50_ms / compute.p50_ms:.0%} "
                "of a step, of which the backward pass covers a part."
            )
            return self._cured(text, "communication")
        names = {"data": "the loader", "communication": "the links"}
        room = " and ".join(text for name, text in names.items() if name in self.parts)
        return f"Computing limits: there is room in {room}." if room else "Computing limits."

    def notes(self) -> list[str]:
        """Return what is unequal or unsteady, each in one sentence."""
        seconds, hosts = self.facts.rank_s or (1.0,), self.facts.hosts
        slowest = max(range(len(seconds)), key=seconds.__getitem__)
        ratio, found = seconds[slowest] / min(seconds), []
        if ratio > _UNEQUAL:
            host = f" ({host_of(slowest, len(seconds), hosts)})" if hosts else ""
            found.append(
                f"The ranks are unequal: rank {slowest}{host} takes {ratio:.2f} times as long as "
                "the fastest, and in each step the others wait for it. `python -m hpctrain doctor` "
                "looks for the cause; with nodes of different speed, `parallel.weights` gives each "
                "its share."
            )
        steps = {name: self.parts[name] for name in ("compute", "whole") if name in self.parts}
        unsteady = {name: part.p95_ms / part.p50_ms for name, part in steps.items()}
        if unsteady and (most := max(unsteady.values())) > _UNSTEADY:
            name = max(unsteady, key=unsteady.__getitem__)
            found.append(
                f"The steps fluctuate ({name}): one of twenty takes {most:.1f} times the median or "
                "more. Other programs, heat, or too few cores (`launch.cpus_per_task`) do that, so "
                "repeat it with more --steps before you compare."
            )
        return found

    def _cured(self, text: str, kind: str) -> str:
        cures = self.facts.cures.get(kind)
        return f"{text[:-1]}: {cures}." if cures else text
