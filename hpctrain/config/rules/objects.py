"""The objects that a config names by `_target_`: each exists, and takes the arguments it is given.

model, task ── and the objects among their arguments       optimizer, scheduler ── `options`
data.transforms, data.batch_transforms, data.val_..., hooks, tracking.also ── one by one
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from hpctrain.config.rules import arguments, parameter_rules, targets
from hpctrain.config.schema import OptimizerConfig, SchedulerConfig


def nested(section: str, node: Mapping[str, Any]) -> Iterator[str]:
    """Yield what is wrong with an object, and with those among its arguments."""
    if wrong := _target(section, node.get("_target_"), _choose(section)):
        yield wrong
        return
    yield from arguments.problems(section, node)
    for where, part in _inside(section, node):
        yield from _called(where, part, "it must be package.module.Class")


def listed(key: str, nodes: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """Yield what is wrong with the objects of a list."""
    advice = "it must be package.module.Class, or package.module.function and _partial_: true"
    for i, node in enumerate(nodes):
        yield from _called(f"{key}[{i}]", node, advice)


def _called(where: str, node: Mapping[str, Any], advice: str, **given: Any) -> Iterator[str]:
    if wrong := _target(where, node.get("_target_"), advice):
        yield wrong
    else:
        yield from arguments.problems(where, node, **given)


def _target(where: str, target: Any, advice: str) -> str:
    if not isinstance(target, str) or "." not in target:
        return f"{where}._target_={target}: {advice}"
    problem = targets.problem(target)
    return f"{where}._target_={target}: {problem}" if problem else ""


def _choose(section: str) -> str:
    return f"choose one with {section}=NAME or {section}._target_=package.module.Class"


def _inside(key: str, node: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the keys and contents of the objects that are arguments of another object."""
    if not isinstance(node, dict | list):
        return
    for name, value in node.items() if isinstance(node, dict) else enumerate(node):
        where = f"{key}.{name}" if isinstance(node, dict) else f"{key}[{name}]"
        if isinstance(value, dict) and "_target_" in value:
            yield where, value
        yield from _inside(where, value)


def optimizer(own: OptimizerConfig) -> Iterator[str]:
    """Yield what is wrong with the optimizer and its groups."""
    decay = parameter_rules.weight_decay_of(own)
    node = {"_target_": own._target_, "lr": own.lr, **decay, **own.options}
    inner = {name: f"optimizer.options.{name}" for name in own.options}
    yield from _called("optimizer", node, _choose("optimizer"), positional=1, inner=inner)
    yield from parameter_rules.problems(own)


def schedule(scheduler: SchedulerConfig) -> Iterator[str]:
    """Yield what is wrong with a schedule of the user."""
    target, options = scheduler._target_, scheduler.options
    if target is None:
        if options:
            yield f"scheduler.options={options}: they are for scheduler._target_, which is null"
        return
    advice, given = "it must be package.module.function", {"_target_": target, **options}
    known = None if _target("scheduler", target, advice) else arguments.signature(target)
    if known and any(parameter.name == "max_steps" for parameter in known.parameters):
        given = {"max_steps": 1} | given
    inner = {name: f"scheduler.options.{name}" for name in options}
    yield from _called("scheduler", given, advice, positional=1, inner=inner)
