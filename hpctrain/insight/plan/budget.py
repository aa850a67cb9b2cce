"""How long a training is, and how a plan writes its figures."""

import math
import re
from typing import NamedTuple

from hpctrain.base.errors import ConfigError
from hpctrain.config.rules.batch_sizes import BatchSizeRamp, ramp_of
from hpctrain.config.schema import TrainConfig

_BUDGET = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?(?:e[+]?[0-9]+)?)\s*(tokens|samples|steps|epochs)\s*")


class Budget(NamedTuple):
    """How long a run trains."""

    steps: int | None  # a smaller step of a ramp counts as its part of a whole one; None if unknown
    text: str  # what they come from, for a reader


def budget_of(text: str | None, train: TrainConfig, tokens: int, samples: int | None) -> Budget:
    """Return the budget of a run; a ConfigError if it has no unit that this run has."""
    ramp = ramp_of(train)
    if text is not None:
        return _asked(text, ramp, tokens, samples)
    lengths = []
    if (steps := train.max_steps) is not None:
        lengths.append(Budget(-(-ramp.samples(steps) // ramp.final), f"train.max_steps={steps}"))
    if (epochs := train.max_epochs) is not None and samples is not None:
        epoch = samples // train.global_batch_size
        lengths.append(Budget(epochs * epoch, f"train.max_epochs={epochs}"))
    return min(lengths, default=Budget(None, "no budget"))


def _asked(text: str, ramp: BatchSizeRamp, tokens: int, samples: int | None) -> Budget:
    found = _BUDGET.fullmatch(text.lower())
    if not found or not 0 < float(found[1]) < math.inf:
        raise ConfigError(
            f"--budget={text}: it must be a number with a unit, tokens, samples, steps or epochs, "
            "such as 300e9tokens or 20epochs; the table has the hours and GPU-hours of each layout"
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
    return Budget(max(1, math.ceil(total[unit] / ramp.final)), f"{found[1]} {unit}")


def number(value: float | None) -> str:
    """Return a figure of a plan for a reader, with two or three digits that count."""
    if value is None:
        return "unknown"
    if value >= 100:
        return f"{float(f'{value:.3g}'):,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2g}"
