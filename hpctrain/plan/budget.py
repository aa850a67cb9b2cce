"""How long a run is: `--budget 300e9tokens`, or what the config says."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from hpctrain.config.rules.batch_sizes import Ramp, ramp_of
from hpctrain.config.schema import Config
from hpctrain.errors import ConfigError

_UNITS = ("tokens", "samples", "steps", "epochs")


@dataclass(frozen=True)
class Budget:
    """The steps of a run.

    Attributes:
        steps: Their number, in which a smaller step of a ramp counts as its part of a whole one;
            None if it is unknown.
        text: What it comes from, for a reader.
    """

    steps: int | None
    text: str


def budget_of(text: str | None, config: Config, tokens: int, samples: int | None) -> Budget:
    """Return the budget of a run.

    Args:
        text: The value of `--budget`; None takes the shorter of train.max_steps and max_epochs.
        config: The config.
        tokens: The tokens of a sample; 0 if it has none.
        samples: The samples of an epoch; None if there is no data set.

    Raises:
        ConfigError: It has no unit, or a unit that this run does not have.
    """
    train, ramp = config.train, ramp_of(config)
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
