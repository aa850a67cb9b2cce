"""The objects that a config names by `_target_`: each exists, and takes the arguments it is given.

model, task ── and the objects among their arguments       optimizer, scheduler ── `options`
data.transforms, data.batch_transforms, data.val_..., hooks, tracking.also ── one by one

Those of hpctrain and torch are looked up in their source, here. The others are imported once, in a
process of its own, before a submission (`hpctrain.insight.foreign_targets`).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from inspect import Signature
from typing import Any

from hpctrain.config.rules import own_loop, parameter_rules, targets
from hpctrain.config.schema import Config, SchedulerConfig

_CLASS = "it must be package.module.Class"


@dataclass(frozen=True)
class Called:
    """An object of the config, and how it is called."""

    key: str
    node: Mapping[str, Any]  # its `_target_` and arguments
    advice: str = _CLASS
    positional: int = 0  # arguments that hpctrain gives before them
    inner: Mapping[str, str] = field(default_factory=dict)  # config keys of arguments elsewhere
    maybe: tuple[str, ...] = ()  # arguments that hpctrain gives to those who have them

    @property
    def problem(self) -> str:
        """Why its target cannot be there, or ""."""
        target = self.node.get("_target_")
        where = f"{self.key}._target_={target}"
        if not isinstance(target, str) or "." not in target:
            return f"{where}: {self.advice}"
        wrong = targets.problem(target)
        return f"{where}: {wrong}" if wrong else ""

    @property
    def is_own(self) -> bool:
        """Whether it is of hpctrain or torch."""
        return targets.is_own(str(self.node.get("_target_")))

    @property
    def signature(self) -> Signature | None:
        """The signature of one of hpctrain or torch, as far as its source shows it."""
        return targets.signature(self.node["_target_"]) if self.is_own else None

    def misfits(self, known: Signature | None) -> Iterator[str]:
        """Yield what is wrong with its arguments, if the target has this signature."""
        node = self.node
        if known:
            node = {name: 1 for name in self.maybe if name in known.parameters} | dict(node)
        yield from targets.misfits(self.key, node, known, self.positional, self.inner)


def called(config: Config) -> Iterator[Called]:
    """Yield the objects of a config."""
    if own_loop.has_own(config):
        if not own_loop.is_program(config):
            advice = "it must be package.module.function, which takes the session"
            yield Called("loop", config.loop, advice, positional=1)
        yield from _listed(config)
        return
    for section, node in (("model", config.model), ("task", config.task)):
        yield Called(section, node, _choose(section))
        yield from (Called(where, part) for where, part in _inside(section, node))
    own = config.optimizer
    node = {"_target_": own._target_, "lr": own.lr, **own.options}
    node |= parameter_rules.weight_decay_of(own)
    inner = {name: f"optimizer.options.{name}" for name in own.options}
    yield Called("optimizer", node, _choose("optimizer"), positional=1, inner=inner)
    if config.scheduler._target_ is not None:
        yield _schedule(config.scheduler)
    yield from _listed(config)


def _schedule(own: SchedulerConfig) -> Called:
    return Called(
        "scheduler",
        {"_target_": own._target_, **own.options},
        "it must be package.module.function",
        positional=1,
        inner={name: f"scheduler.options.{name}" for name in own.options},
        maybe=("max_steps",),
    )


def _listed(config: Config) -> Iterator[Called]:
    """Yield the objects of the lists of a config."""
    data = config.data
    names = ("transforms", "batch_transforms", "val_transforms", "val_batch_transforms")
    lists = {f"data.{name}": getattr(data, name) or [] for name in names}
    lists |= {"hooks": config.hooks, "tracking.also": config.tracking.also}
    advice = f"{_CLASS}, or package.module.function and _partial_: true"
    for key, nodes in lists.items():
        yield from (Called(f"{key}[{i}]", node, advice) for i, node in enumerate(nodes))


def problems(config: Config) -> Iterator[str]:
    """Yield what is wrong with the objects of a config, as far as nothing has to be imported."""
    for one in called(config):
        if (known := one.signature) is not None:
            yield from one.misfits(known)
        elif wrong := one.problem:
            yield wrong
    if not own_loop.has_own(config):
        yield from parameter_rules.problems(config.optimizer)


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
