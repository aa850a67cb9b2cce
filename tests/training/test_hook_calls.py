"""Hooks that change what is trained."""

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from hpctrain.addons.hooks import Hook, Hooks, RunState
from hpctrain.errors import ConfigError
from hpctrain.tasks import Classification
from hpctrain.tracking.tracker import Tracker


class Sets(Hook):
    """Let a parameter be trained or not at steps."""

    def __init__(self, name: str, steps: dict[int, bool]) -> None:
        self.name, self.steps = name, steps

    def after_step(self, state: RunState) -> None:
        parameter = dict(state.model.named_parameters())[self.name]
        parameter.requires_grad_(self.steps.get(state.step, parameter.requires_grad))


def calls(hook: Hook) -> Callable[[int], None]:
    """Return what calls a hook after a step of a model whose bias is frozen."""
    model = nn.ModuleDict({"module": nn.Linear(2, 2)})  # as DDP wraps it
    model["module"].bias.requires_grad_(False)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    hooks = Hooks([Hook(), hook], model, optimizer, Classification("x", "y"), Tracker())

    def after(step: int) -> None:
        hooks.session = SimpleNamespace(step=step, metrics={})
        hooks.after_step(step, {})

    return after


def test_a_hook_that_unfreezes_what_the_optimizer_lacks_is_told() -> None:
    after = calls(Sets("module.bias", {3: True}))
    after(1)
    after(2)
    with pytest.raises(ConfigError) as caught:
        after(3)
    assert "Sets has unfrozen bias at step 3, which the optimizer lacks" in str(caught.value)
    assert "optimizer.groups=[{match: bias, lr_factor: 0.1}]" in str(caught.value)
    assert "checkpoint.init_from=RUN" in str(caught.value)


def test_a_hook_may_freeze_for_a_while() -> None:
    after = calls(Sets("module.weight", {1: False, 3: True}))
    for step in range(1, 5):
        after(step)
