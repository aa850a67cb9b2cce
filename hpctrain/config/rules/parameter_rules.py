"""What each of `optimizer.groups` must look like, before there is a model with names to match."""

import math
from collections.abc import Iterator
from typing import Any

from hpctrain.config.rules import arguments, targets
from hpctrain.config.schema import OptimizerConfig

NAMED = "named_parameters"  # an optimizer whose first argument has this name gets pairs
NEEDS_CLOSURE = (
    "needs a closure that computes the loss again within a step. A step of hpctrain is one forward "
    "and backward pass: use an optimizer whose step() works by itself, such as optimizer=adamw"
)
# Of torch; others are asked when they are built.
_UNFIT = {
    "LBFGS": NEEDS_CLOSURE,
    "SparseAdam": "needs sparse gradients. Gradients here are dense, because ranks add them, and "
    "they are clipped and judged: use optimizer=adamw",
}
_KEYS = ("match", "lr_factor", "weight_decay", "freeze", "options")


def problems(config: OptimizerConfig) -> Iterator[str]:
    """Yield what is wrong with `optimizer.groups` and `optimizer.layer_decay`."""
    if reason := _UNFIT.get(config._target_.removeprefix("torch.optim.")):
        yield f"optimizer._target_={config._target_} {reason}"
    if config.weight_decay and not _takes_weight_decay(config._target_):
        yield (
            f"optimizer.weight_decay={config.weight_decay}: {config._target_} has no weight decay; "
            "give optimizer.weight_decay=0"
        )
    if config.groups or config.layer_decay is not None:
        yield from _groups(config)


def _groups(config: OptimizerConfig) -> Iterator[str]:
    for i, rule in enumerate(config.groups):
        yield from _rule(f"optimizer.groups[{i}]", rule)
        yield from _options(f"optimizer.groups[{i}].options", rule.get("options"), config._target_)
        if rule.get("weight_decay") and not _takes_weight_decay(config._target_):
            yield (
                f"optimizer.groups[{i}].weight_decay={rule['weight_decay']}: {config._target_} has "
                "no weight decay"
            )
    sets = config.layer_decay is not None or any(
        {"lr_factor", "weight_decay", "options"} & rule.keys() for rule in config.groups
    )
    known = arguments.signature(config._target_)
    if sets and known and [*known.parameters][:1] == [NAMED]:
        yield (
            f"optimizer._target_={config._target_} takes {NAMED} and makes the groups itself: "
            "optimizer.groups may only freeze, and optimizer.layer_decay must be null"
        )


def weight_decay_of(config: OptimizerConfig) -> dict[str, float]:
    """Return the argument weight_decay; nothing for an optimizer that has none, such as Rprop."""
    takes = _takes_weight_decay(config._target_)
    return {"weight_decay": config.weight_decay} if takes else {}


def _takes_weight_decay(target: str) -> bool:
    """Return whether an optimizer has an argument weight_decay; True where no source shows it."""
    known = arguments.signature(target)
    return known is None or "weight_decay" in known.parameters or arguments.takes_any(known)


def patterns(rule: dict[str, Any]) -> list[str]:
    """Return the patterns of a rule, which has one or a list of them."""
    match = rule["match"]
    return [match] if isinstance(match, str) else list(match)


def _rule(key: str, rule: dict[str, Any]) -> Iterator[str]:
    for unknown in [name for name in rule if name not in _KEYS]:
        yield f"{key}.{unknown} is unknown: a group has {', '.join(_KEYS)}"
    match = rule.get("match")
    texts = match if isinstance(match, list) else [match]
    if not texts or not all(isinstance(text, str) and text for text in texts):
        yield f"{key}.match={match}: it must be a pattern such as '*.bias', or a list of them"
    for name, lowest in (("lr_factor", "greater than 0"), ("weight_decay", "at least 0")):
        value = rule.get(name, 1.0)
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not 0 <= value < math.inf or (name == "lr_factor" and value == 0):
            yield f"{key}.{name}={value}: it must be a number {lowest}"
    if not isinstance(rule.get("freeze", True), bool):
        yield f"{key}.freeze={rule['freeze']}: it must be true or false"
    if not rule.keys() & {*_KEYS[1:]}:
        yield f"{key}={rule}: it changes nothing; give {', '.join(_KEYS[1:])}"


def _options(key: str, options: Any, target: str) -> Iterator[str]:
    """Yield what is wrong with the arguments of the optimizer that a group has for itself.

    Of a class that is not torch's, only the optimizer itself can tell what its groups may have.
    """
    if options is None:
        return
    if not isinstance(options, dict) or not all(isinstance(name, str) for name in options):
        yield f"{key}={options}: it must be the names and values of arguments of the optimizer"
        return
    for name, other in (("lr", "lr_factor"), ("weight_decay", "weight_decay")):
        if name in options:
            yield f"{key}.{name}={options[name]}: give {other} of the group in place of it"
    if targets.is_own(target):
        given = {n: v for n, v in options.items() if n not in ("lr", "weight_decay")}
        node = {"_target_": target, "_partial_": True, **given}
        yield from arguments.problems(key, node, arguments.signature(target), positional=1)
