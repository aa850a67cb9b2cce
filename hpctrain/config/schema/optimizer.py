"""The keys of `optimizer` and `scheduler`."""

# ruff: noqa: RUF009 (`key` and `section` return dataclass fields)
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hpctrain.config.schema.key import key


def _check_decay(decay: float | None) -> str:
    return "" if decay is None or 0 < decay <= 1 else "it must be greater than 0 and at most 1"


@dataclass
class OptimizerConfig:
    """Any torch optimizer."""

    _target_: str = key(
        "torch.optim.AdamW",
        "This class is the optimizer. It, or a function that returns an optimizer, gets a list of "
        "the parameters, lr, weight_decay and options. If its first argument is called "
        "named_parameters, it gets pairs of a name and a parameter. If its groups of parameters "
        "have learning rates of their own, lr_scaling and the schedule multiply all of them by "
        "one factor.",
    )
    lr: float = key(
        1e-3,
        "The learning rate has this value after warm-up, unless lr_scaling changes it.",
        above=0,
    )
    lr_scaling: str = key(
        "none",
        "The learning rate is lr (none), or lr times train.global_batch_size / base_batch_size "
        "(linear), or lr times the square root of that ratio (sqrt).",
        choices=("none", "linear", "sqrt"),
    )
    base_batch_size: int | None = key(
        None,
        "lr was chosen for this global batch size. lr_scaling=linear and sqrt need it.",
        unit="samples",
        at_least=1,
    )
    weight_decay: float = key(0.0, "The optimizer gets this weight decay.", at_least=0)
    options: dict[str, Any] = key({}, "The optimizer also gets these keyword arguments.")
    groups: list[dict[str, Any]] = key(
        [],
        "Each of these is {match: PATTERN, lr_factor: ..., weight_decay: ..., freeze: ...} for the "
        "parameters whose names match the pattern, such as '*.bias', or one of a list of patterns. "
        "lr_factor multiplies the learning rate, and freeze=true does not train them. If several "
        "match and give the same key, the last one decides.",
    )
    layer_decay: float | None = key(
        None,
        "Each block has the learning rate of the next one times this factor; what is behind the "
        "last block has the whole rate. Null gives all blocks the same. parallel.blocks names the "
        "classes of blocks that are not found.",
        check=_check_decay,
    )


@dataclass
class SchedulerConfig:
    """The learning rate over the steps: a linear warm-up, then a decay."""

    kind: str = key(
        "cosine",
        "After warm-up the learning rate stays constant, or falls linearly or along a cosine.",
        choices=("constant", "linear", "cosine"),
    )
    warmup_steps: int = key(
        0, "The learning rate rises from 0 over this many steps.", unit="steps", at_least=0
    )
    warmup_samples: int | None = key(
        None,
        "The warm-up has this many samples, in place of warmup_steps. Null or 0 is not used.",
        unit="samples",
        at_least=0,
    )
    warmup_epochs: float | None = key(
        None,
        "The warm-up has this many epochs, in place of warmup_steps. Null or 0 is not used.",
        unit="epochs",
        at_least=0,
    )
    final_ratio: float = key(
        0.0, "The decay ends at this fraction of the learning rate after warm-up.", between=(0, 1)
    )
