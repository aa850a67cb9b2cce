"""What every writing command takes."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Options:
    """How to write: `shard_bytes` of data in a shard, `command` for the provenance."""

    shard_bytes: int
    overwrite: bool = False
    quiet: bool = False
    command: str = ""
