"""How long a run is, and what it may take.

--budget 300e9tokens or 2weeks, or what the config says ── Budget
--deadline 24h, --max-cost 500USD ── Limits ── which layouts are good enough
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

from hpctrain.config.rules.batch_sizes import Ramp, ramp_of
from hpctrain.config.schema import TrainConfig
from hpctrain.errors import ConfigError
from hpctrain.hardware import Hardware

_NUMBER = r"\s*([0-9]+(?:\.[0-9]+)?(?:e[+]?[0-9]+)?)\s*"
_HOURS = {"m": 1 / 60, "h": 1.0, "d": 24.0, "w": 168.0}  # by the first letter of the unit
_TIME = re.compile(rf"{_NUMBER}(min(?:utes?)?|h(?:ours?)?|d(?:ays?)?|w(?:eeks?)?)\s*")
_GPU_HOURS = re.compile(rf"{_NUMBER}gpu[ -]?h(?:ours?)?\s*")


@dataclass(frozen=True)
class Budget:
    """How long a run trains: a number of steps, or as many as a time allows."""

    steps: int | None  # a smaller step of a ramp counts as its part of a whole one; None if unknown
    text: str  # what they come from, for a reader
    hours: float | None = None  # on the clock, in place of the steps
    gpu_hours: float | None = None  # of all GPUs together, in place of the steps

    @property
    def is_time(self) -> bool:
        """Whether a time is given, so that the number of steps follows from the layout."""
        return self.hours is not None or self.gpu_hours is not None

    def steps_of(self, step_s: float | None, ranks: int) -> int | None:
        """Return the steps of a layout whose steps take so long; None if that is unknown."""
        if not self.is_time or step_s is None:
            return self.steps
        hours = self.hours if self.gpu_hours is None else self.gpu_hours / ranks
        return max(1, int((hours or 0.0) * 3600 / step_s))


@dataclass(frozen=True)
class Limits:
    """What a run may take."""

    hours: float | None = None  # on the clock; None is no limit
    cost: float | None = None  # in the currency of the prices; None is no limit
    currency: str = ""  # "" takes any

    @classmethod
    def of(cls, deadline: str | None, max_cost: str | None) -> Limits:
        """Return the limits of a command line, each a positive number with its unit."""
        hours = None if deadline is None else hours_of("--deadline", deadline)
        cost = re.fullmatch(rf"{_NUMBER}([A-Z]{{3}})?\s*", max_cost or "1")
        if not cost or not float(cost[1]):
            raise ConfigError(f"--max-cost={max_cost}: it must be an amount such as 500 or 500USD")
        return cls(hours, None if max_cost is None else float(cost[1]), cost[2] or "")

    def check(self, budget: Budget, hardware: Hardware | None) -> None:
        """Raise a ConfigError if the run's length or price is unknown, or has another currency."""
        if self != Limits() and budget.steps is None and not budget.is_time:
            raise ConfigError("--deadline and --max-cost need the length of the run: add --budget")
        if self.cost is None or hardware is None:
            return
        price = hardware.price_per_hour
        if price is None or self.currency not in ("", price.currency):
            why = f"the price is in {price.currency}" if price else "the hardware has no price"
            raise ConfigError(f"--max-cost: {why}; hardware.price.own='1.20 EUR' sets yours")

    def excess(self, hours: float | None, cost: float | None, currency: str) -> float | None:
        """Return how many times a run takes what it may; None if that is unknown."""
        shares = [share for share, _ in self._parts(hours, cost, currency)]
        most = max(filter(None, shares), default=0.0)
        return None if most <= 1 and None in shares else most

    def exceeded(self, hours: float | None, cost: float | None, currency: str) -> str:
        """Return what a run takes more than it may, for a reader; "" if nothing is known."""
        parts = self._parts(hours, cost, currency)
        found = " and ".join(text for share, text in parts if share and share > 1)
        return found and f"takes {found}"

    def _parts(
        self, hours: float | None, cost: float | None, currency: str
    ) -> Iterator[tuple[float | None, str]]:
        if (most := self.hours) is not None:
            text = f"{_beside(hours, most)} hours (--deadline {most:,.4g})"
            yield hours and hours / most, text
        if (most := self.cost) is not None:
            known = cost if self.currency in ("", currency) else None
            text = f"{_beside(cost, most)} {currency} (--max-cost {most:,.10g})"
            yield known and known / most, text


def hours_of(option: str, text: str) -> float:
    """Return the hours of a time such as 90min or 2weeks; a ConfigError names the option."""
    found = _TIME.fullmatch(text.lower())
    if not found or not 0 < float(found[1]) < math.inf:
        raise ConfigError(f"{option}={text}: it must be a time such as 90min, 24h, 3d or 2weeks")
    return float(found[1]) * _HOURS[found[2][0]]


def number(value: float | None) -> str:
    """Return a figure of a plan for a reader, with two or three digits that count."""
    if value is None:
        return "unknown"
    if value >= 100:
        return f"{float(f'{value:.3g}'):,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2g}"


def _beside(value: float | None, limit: float) -> str:
    """Return a figure with so many digits that it is seen to be above its limit."""
    if value is None or float(number(value).replace(",", "")) > limit:
        return number(value)
    return f"{value:,.6g}"


def budget_of(text: str | None, train: TrainConfig, tokens: int, samples: int | None) -> Budget:
    """Return the budget of a run; a ConfigError if it has no unit that this run has."""
    ramp = ramp_of(train)
    if text is not None:
        told = re.sub(rf"^{_NUMBER}", r"\1 ", text.lower()).strip()
        if found := _GPU_HOURS.fullmatch(text.lower()):
            return Budget(None, f"{found[1]} GPU-hours", gpu_hours=float(found[1]))
        if _TIME.fullmatch(text.lower()):
            return Budget(None, told, hours=hours_of("--budget", text))
        return Budget(_steps(text, ramp, tokens, samples), told)
    lengths = []
    if (steps := train.max_steps) is not None:
        lengths.append((-(-ramp.samples(steps) // ramp.final), f"train.max_steps={steps}"))
    if (epochs := train.max_epochs) is not None and samples is not None:
        epoch = samples // train.global_batch_size
        lengths.append((epochs * epoch, f"train.max_epochs={epochs}"))
    return Budget(*min(lengths, default=(None, "no budget")))


def _steps(text: str, ramp: Ramp, tokens: int, samples: int | None) -> int:
    found = re.fullmatch(rf"{_NUMBER}(tokens|samples|steps|epochs)\s*", text.lower())
    if not found or not 0 < float(found[1]) < math.inf:
        raise ConfigError(
            f"--budget={text}: it must be a number with a unit, tokens, samples, steps, epochs, "
            "gpuhours, hours, days or weeks, such as 300e9tokens, 20epochs, 3000gpuhours or 2weeks"
        )
    number, unit = float(found[1]), found[2]
    if unit == "tokens" and not tokens:
        raise ConfigError(f"--budget={text}: the samples of this run have no tokens; use samples")
    if unit == "epochs" and samples is None:
        raise ConfigError(f"--budget={text}: without a data set the length of an epoch is unknown")
    total = {
        "steps": ramp.samples(math.ceil(number)),
        "tokens": number / max(1, tokens),
        "samples": number,
        "epochs": number * (samples or 0),
    }
    return max(1, math.ceil(total[unit] / ramp.final))
