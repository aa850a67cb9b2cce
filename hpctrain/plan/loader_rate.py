"""What the loader has to read in a second, beside what the storage gives.

index.json ── bytes of the files / samples ── x samples per second / nodes ──┐
hardware.storage_mb_per_s ───────────────────────────────────────────────────┴── enough?
"""

from typing import Any

from hpctrain.config.schema import DataConfig
from hpctrain.hardware import Hardware
from hpctrain.plan.inspecting.sample_shape import parts_of, samples_of_epoch
from hpctrain.plan.predicting.estimator import Estimate


def loader_rate(
    data: DataConfig | None, hardware: Hardware | None, one: Estimate | None
) -> dict[str, Any]:
    """Return what one layout needs, in 1e6 bytes per second of a node; None is unknown."""
    size, needed = None if data is None else _sample_bytes(data), None
    if one and one.samples_per_s is not None and size is not None:
        needed = one.samples_per_s * size / one.layout.nodes / 1e6
    storage = hardware.storage_rate / 1e6 if hardware and hardware.storage_rate else None
    return {
        "bytes_per_sample": size,
        "needed_mb_per_s": needed,
        "storage_mb_per_s": storage,
        "enough": None if needed is None or storage is None else needed <= storage,
    }


def _sample_bytes(data: DataConfig) -> float:
    """Return the bytes of the files of an epoch for each of its samples; overlaps count again."""
    total = float(sum(shard.bytes for _, _, shards in parts_of(data) for shard in shards))
    if (windows := data.windows).field is not None and windows.length and windows.stride:
        total *= max(1.0, windows.length / windows.stride)
    return total / max(1, samples_of_epoch(data) // max(1, data.repeat))
