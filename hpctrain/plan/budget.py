"""How long a run is, and what it may take.

--budget 300e9tokens, or what the config says ── Budget
--deadline 24h, --max-cost 500USD ────────────── Limits ── which layouts are good enough
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from hpctrain.config.rules.batch_sizes import Ramp, ramp_of
from hpctrain.config.schema import TrainConfig
from hpctrain.errors import ConfigError

_UNITS = ("tokens", "samples", "steps", "epochs")
_HOURS = {"min": 1 / 60, "h": 1.0, "d": 24.0}
_NUMBER = r"\s*([0-9]+(?:\.[0-9]+)?(?:e[+]?[0-9]+)?)\s*"


@dataclass(frozen=True)
class Budget:
    """The steps of a run."""

    steps: int | None  # a smaller step of a ramp counts as its part of a whole one; None if unknown
    text: str  # what they come from, for a reader


@dataclass(frozen=True)
class Limits:
    """What a run may take."""

    hours: float | None = None  # on the clock; None is no limit
    cost: float | None = None  # in the currency of the prices; None is no limit
    currency: str = ""  # "" takes any

    @classmethod
    def of(cls, deadline: str | None, max_cost: str | None) -> Limits:
        """Return the limits of a command line, each a positive number with its unit."""
        hours = re.fullmatch(rf"{_NUMBER}({'|'.join(_HOURS)})\s*", deadline or "1h")
        cost = re.fullmatch(rf"{_NUMBER}([A-Z]{{3}})?\s*", max_cost or "1")
        if not hours or not float(hours[1]):
            raise ConfigError(f"--deadline={deadline}: it must be a time such as 90min, 24h or 3d")
        if not cost or not float(cost[1]):
            raise ConfigError(f"--max-cost={max_cost}: it must be an amount such as 500 or 500USD")
        return cls(
            None if deadline is None else float(hours[1]) * _HOURS[hours[2]],
            None if max_cost is None else float(cost[1]),
            cost[2] or "",
        )

    def check(self, budget: Budget, price: str | None) -> None:
        """Raise a ConfigError if the run's length or price is unknown, or has another currency."""
        if self == Limits():
            return
        if budget.steps is None:
            raise ConfigError("--deadline and --max-cost need the length of the run: add --budget")
        if self.cost is not None and price is not None and price != (self.currency or price or "-"):
            why = f"the price is in {price}" if price else "the hardware has no price"
            raise ConfigError(f"--max-cost: {why}; hardware.price.own='1.20 EUR' sets yours")

    def excess(self, hours: float | None, cost: float | None, currency: str) -> float:
        """Return how many times a run takes what it may; inf if that is unknown."""
        return max(self._parts(hours, cost, currency).values(), default=0.0)

    def exceeded(self, hours: float | None, cost: float | None, currency: str) -> str:
        """Return what a run takes of what it may, for a reader; "" if it is not more."""
        texts = {
            "hours": f"{_beside(hours, self.hours)} hours (--deadline {self.hours:,.4g})"
            if self.hours
            else "",
            "cost": f"{_beside(cost, self.cost)} {currency} (--max-cost {self.cost:,.10g})"
            if self.cost
            else "",
        }
        parts = self._parts(hours, cost, currency)
        found = [texts[name] for name, share in parts.items() if share > 1]
        return f"takes {' and '.join(found)}" if found else ""

    def _parts(self, hours: float | None, cost: float | None, currency: str) -> dict[str, float]:
        parts = {}
        if self.hours is not None:
            parts["hours"] = math.inf if hours is None else hours / self.hours
        if self.cost is not None:
            other = cost is None or self.currency not in ("", currency)
            parts["cost"] = math.inf if cost is None or other else cost / self.cost
        return parts


def number(value: float | None) -> str:
    """Return a figure of a plan for a reader, with two digits that count, or more."""
    if value is None:
        return "unknown"
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2g}"


def _beside(value: float | None, limit: float) -> str:
    """Return a figure with so many digits that it is seen to be above its limit."""
    if value is None or float(number(value).replace(",", "")) > limit:
        return number(value)
    return f"{value:,.6g}"


def budget_of(text: str | None, train: TrainConfig, tokens: int, samples: int | None) -> Budget:
    """Return the budget of a run; a ConfigError if it has no unit that this run has."""
    ramp = ramp_of(train)
    if text is not None:
        return Budget(_steps(text, ramp, tokens, samples), text)
    lengths = []
    if train.max_steps is not None:
        whole = -(-ramp.samples(train.max_steps) // ramp.final)
        lengths.append((whole, f"train.max_steps={train.max_steps}"))
    if train.max_epochs is not None and samples is not None:
        epoch = samples // train.global_batch_size
        lengths.append((train.max_epochs * epoch, f"train.max_epochs={train.max_epochs}"))
    return Budget(*min(lengths)) if lengths else Budget(None, "no budget")


def _steps(text: str, ramp: Ramp, tokens: int, samples: int | None) -> int:
    found = re.fullmatch(r"\s*([0-9.]+(?:e[+]?[0-9]+)?)\s*([a-z]*)\s*", text.lower())
    try:
        number = float(found[1]) if found else math.nan
    except ValueError:
        number = math.nan
    unit = found[2] if found else ""
    if not found or unit not in _UNITS or not 0 < number < math.inf:
        raise ConfigError(
            f"--budget={text}: it must be a number with a unit, {', '.join(_UNITS)}, such as "
            "300e9tokens or 20epochs"
        )
    if unit == "tokens" and not tokens:
        raise ConfigError(f"--budget={text}: the samples of this run have no tokens; use samples")
    if unit == "epochs" and samples is None:
        raise ConfigError(f"--budget={text}: without a data set the length of an epoch is unknown")
    total = {
        "steps": ramp.samples(math.ceil(number)),
        "tokens": number / max(1, tokens),
        "samples": number,
    }
    total["epochs"] = number * (samples or 0)
    return max(1, math.ceil(total[unit] / ramp.final))
