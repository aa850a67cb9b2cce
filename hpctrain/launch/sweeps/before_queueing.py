"""What a user should know before the runs of a sweep are queued; nothing of it stops them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hpctrain.forecast import cautions, node_weights, time_limit
from hpctrain.launch.arrays import Entry
from hpctrain.launch.slurm import node_range
from hpctrain.launch.slurm.partition_limit import beyond_partition, not_requeued

_AUTO = f"launch.time_min={time_limit.AUTO}"


def notes(entries: Sequence[Entry], cluster: bool) -> Iterator[str]:
    """Yield each note once for all runs; on a `cluster`, Slurm is asked for limits of time."""
    configs = [entry.config for entry in entries]
    chosen = {e.config.launch.time_min: e.config for e in entries if _AUTO in e.overrides}
    yield from filter(None, map(time_limit.note, chosen.values()))
    yield from dict.fromkeys(
        node_weights.note(entry.config)
        for entry in entries
        if any(text.startswith(f"parallel.weights={node_weights.AUTO}") for text in entry.overrides)
    )
    yield from filter(None, dict.fromkeys(node_range.note(config) for config in configs))
    yield from cautions.of_sweep(configs)
    if cluster:
        limits = {(config.site.partition, config.launch.time_min): config for config in configs}
        yield from filter(None, dict.fromkeys(map(beyond_partition, limits.values())))
        yield from filter(None, dict.fromkeys(map(not_requeued, limits.values())))
