"""What the loader has to read in a second, beside what the storage gives.

index.json ── bytes of the files / samples ── x samples per second / nodes ──┐
hardware.storage_mb_per_s ───────────────────────────────────────────────────┴── enough?
"""

from dataclasses import dataclass
from typing import Any

from hpctrain.config.schema import DataConfig
from hpctrain.hardware import Hardware
from hpctrain.plan.inspecting.sample_shape import parts_of, samples_of_epoch
from hpctrain.plan.predicting.estimator import Estimate


@dataclass(frozen=True)
class LoaderRate:
    """The sizes that decide whether the storage is fast enough."""

    sample_bytes: float | None  # read for a sample; None without a data set
    storage: float | None  # bytes per second of a node; None if unknown

    def as_json(self, one: Estimate | None) -> dict[str, Any]:
        """Return the object of `--json`: 1e6 bytes per second of a node, for one layout."""
        needed, storage = None, self.storage and self.storage / 1e6
        if one and one.samples_per_s is not None and self.sample_bytes is not None:
            needed = one.samples_per_s * self.sample_bytes / one.layout.nodes / 1e6
        return {
            "bytes_per_sample": self.sample_bytes,
            "needed_mb_per_s": needed,
            "storage_mb_per_s": storage,
            "enough": None if needed is None or storage is None else needed <= storage,
        }

    def text(self, estimate: Estimate) -> str:
        """Return the same as a line for a reader."""
        _, needed, storage, enough = self.as_json(estimate).values()
        if needed is None:
            return "loader: unknown, as there is no data set or no step time"
        line = f"loader: each node reads {needed:,.1f} MB/s"
        if storage is None:
            return f"{line}; that of the storage is unknown: hardware.storage_mb_per_s"
        verdict = "enough" if enough else "too slow, so the GPUs will wait for data"
        return f"{line}; the storage gives {storage:,.0f}: {verdict}"


def loader_rate(data: DataConfig | None, hardware: Hardware | None) -> LoaderRate:
    """Return what is known of reading the data; a DataError if there is no such data set."""
    storage = None if hardware is None else hardware.storage_rate
    return LoaderRate(None if data is None else _sample_bytes(data), storage)


def _sample_bytes(data: DataConfig) -> float:
    """Return the bytes of the files of an epoch for each of its samples; overlaps count again."""
    total = float(sum(shard.bytes for _, _, shards in parts_of(data) for shard in shards))
    if (windows := data.windows).field is not None and windows.length and windows.stride:
        total *= max(1.0, windows.length / windows.stride)
    return total / max(1, samples_of_epoch(data) // max(1, data.repeat))
