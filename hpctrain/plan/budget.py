"""How long a run is: --budget 300e9tokens or 2weeks, or what the config says."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from hpctrain.config.rules.batch_sizes import Ramp, ramp_of
from hpctrain.config.schema import TrainConfig
from hpctrain.errors import ConfigError

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
