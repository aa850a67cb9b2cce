"""A part of a user, for our own loop and for others."""

from typing import Any

import hpctrain


class Counted(hpctrain.Part):
    name = "counted"

    def __init__(self, factor: int = 1) -> None:
        self.factor, self.rows = factor, 0

    def flags(self) -> list[float]:
        return [1.0]

    def offer(self, totals: Any) -> None:
        self.ranks = float(totals[0])

    def after_step(self, step: int, batch: dict[str, Any]) -> None:
        self.rows += int(self.ranks) * self.factor * len(batch["mask"])

    def report(self) -> dict[str, float]:
        return {"train/rows": float(self.rows)}

    def state_dict(self) -> dict[str, int]:
        return {"rows": self.rows}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.rows = state.get("rows", 0)
