"""The keys of `hang`."""

from __future__ import annotations

from dataclasses import dataclass

from hpctrain.config.schema.key import key


@dataclass
class HangConfig:
    """One process per node watches whether the ranks get on, and names one that does not."""

    floor_s: float | None = key(
        30.0,
        "A rank hangs if it does not get on for this time, and for 10 times as long as usual: in a "
        "step, a batch of an evaluation, a checkpoint. Null watches nothing.",
        unit="seconds",
        at_least=1,
    )
