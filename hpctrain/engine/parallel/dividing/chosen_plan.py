"""The plan by which a model is divided: from the config, the model, or Hugging Face's config."""

import logging
from dataclasses import replace
from typing import Any

from torch import nn

from hpctrain.base.errors import ConfigError
from hpctrain.config.rules.degrees import Degrees, expert_problems, names_module, number_problems
from hpctrain.config.schema import ParallelConfig
from hpctrain.config.schema.parallel import STYLES
from hpctrain.engine.layers.plan import Plan

log = logging.getLogger(__name__)

_MISSING = {
    "ep": "experts; hpctrain.models.Transformer has them with model.experts=8",
    "tp": "plan for tensor parallel; give the styles of its modules, such as "
    "'parallel.plan={layers.*.up: colwise, layers.*.down: rowwise}'",
    "pp": "plan for pipeline parallel; it needs a property `plan` that returns "
    "hpctrain.engine.layers.plan.Plan(first=('embed',), blocks='layers', last=('norm', 'head'))",
    "cp": "plan for context parallel; hpctrain.models.Transformer has one, whose attribute "
    "`context` is an example",
}
# Styles of transformers under another name, and the name that the same style has here.
_SAME = {"colwise_rep": "colwise_gather_output"}


def find_plan(model: nn.Module, parallel: ParallelConfig, degrees: Degrees) -> Plan:
    """Return the plan of a whole model, complete for the degrees; `parallel.plan` goes first."""
    plan = getattr(model, "plan", None)
    if not isinstance(plan, Plan):
        plan = _of_transformers(model)
    if parallel.plan:
        plan = replace(plan, tensor=dict(parallel.plan))
    kind = type(model).__name__
    if plan.experts and parallel.plan:
        raise ConfigError(
            f"parallel.plan={parallel.plan}: {kind} has experts, so leave the plan to the model"
        )
    parts = {
        "ep": (parallel.ep, plan.experts),
        "tp": (degrees.tp, plan.tensor),
        "pp": (degrees.pp, plan.blocks),
        "cp": (degrees.cp, plan.context),
    }
    for key, (degree, part) in parts.items():
        if degree > 1 and not part:
            raise ConfigError(f"parallel.{key}={degree}: {kind} has no {_MISSING[key]}")
    for name, module in matching(model, plan.experts) if plan.experts else ():
        rows = {len(p) for p in module.parameters()}
        for problem in expert_problems(name, min(rows), degrees, parallel):
            raise ConfigError(problem)
    if degrees.tp > 1:
        _check(model, plan, degrees.tp)
    return plan


def matching(model: nn.Module, pattern: str) -> list[tuple[str, nn.Module]]:
    """Return the names and modules that a pattern of a plan names."""
    return [(n, module) for n, module in model.named_modules() if names_module(pattern, n)]


def _check(model: nn.Module, plan: Plan, tp: int) -> None:
    for problem in number_problems(plan.numbers, tp):
        raise ConfigError(problem)
    for pattern, style in plan.tensor.items():
        modules = matching(model, pattern)
        if not modules:
            linear = [n for n, module in model.named_modules() if isinstance(module, nn.Linear)]
            raise ConfigError(
                f"parallel.plan: {type(model).__name__} has no module {pattern}; its linear layers "
                f"are {', '.join(linear[:8])}{', ...' if len(linear) > 8 else ''}"
            )
        for name, module in modules:
            kind = nn.Embedding if style == "embedding_rowwise" else nn.Linear
            if "wise" in style and not isinstance(module, kind):
                raise ConfigError(
                    f"parallel.plan: {pattern}={style}: {name} is a {type(module).__name__}; this "
                    f"style divides a torch.nn.{kind.__name__}"
                )
            size = getattr(module, "out_features" if style == "colwise" else "in_features", 0)
            if style in ("colwise", "rowwise") and size % tp:
                raise ConfigError(
                    f"parallel.tp={tp} does not divide the {size} "
                    f"{'outputs' if style == 'colwise' else 'inputs'} of {name}"
                )


def _of_transformers(model: nn.Module) -> Plan:
    """Return the plan of a model of Hugging Face's transformers; an empty one of any other."""
    config: Any = getattr(model, "config", None)
    tensor = {
        name: _SAME.get(style, style)
        for name, style in (getattr(model, "tp_plan", None) or {}).items()
    }
    numbers = {
        key: int(number)
        for key in ("num_attention_heads", "num_key_value_heads")
        if tensor and (number := getattr(config, key, None))
    }
    if other := sorted(set(tensor.values()) - set(STYLES)):
        log.info(
            "%s has a plan with the style %s, which is unknown here", type(model).__name__, other[0]
        )
        tensor = {}
    stages: dict[str, Any] = getattr(model, "_pp_plan", None) or {}
    blocks = [n for n in stages if isinstance(model.get_submodule(n), nn.ModuleList)]
    if len(blocks) != 1:
        return Plan(tensor, numbers)
    order = [n for n, _ in model.named_modules() if n in stages]
    place = order.index(blocks[0])
    return Plan(tensor, numbers, tuple(order[:place]), blocks[0], tuple(order[place + 1 :]))
