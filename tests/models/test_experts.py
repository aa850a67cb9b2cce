"""Tests of the mixture of experts on one process: against plain loops, and their balance."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hpctrain.models import Transformer
from hpctrain.models.experts import Experts, grouped, one_by_one
from tests.bounds import EXACT


def make(**options: Any) -> Experts:
    torch.manual_seed(0)
    if options.get("shared"):
        options["shared"] = nn.Linear(8, 8)
    made = Experts(**{"dim": 8, "hidden": 6, "experts": 5, "std": 0.5, "out_std": 0.5, **options})
    made.balance += torch.randn(5) * 0.1
    return made


def tokens(rows: int = 3, length: int = 7) -> torch.Tensor:
    return torch.randn(rows, length, 8, generator=torch.Generator().manual_seed(1))


def by_loops(module: Experts, x: torch.Tensor) -> torch.Tensor:
    """Compute token by token."""
    bank, samples = module.bank, []
    for sample in x:
        outs = []
        for token in sample:
            logits = module.router @ token
            scores = logits.sigmoid() if module.scores == "sigmoid" else logits.softmax(0)
            ranked = (scores.detach() + module.balance).tolist()
            order = sorted(range(module.experts), key=lambda e: -ranked[e])
            chosen = order[: module.per_token]
            total = sum(scores[e] for e in chosen)
            out = torch.zeros(8) if module.shared is None else module.shared(token)
            for e in chosen:
                inner = F.silu(bank.gate[e] @ token) * (bank.up[e] @ token)
                out = out + scores[e] / total * (inner @ bank.down[e])
            outs.append(out)
        samples.append(torch.stack(outs))
    return torch.stack(samples)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"scores": "softmax", "per_token": 3},
        {"per_token": 1},
        {"per_token": 5},
        {"shared": True},
    ],
    ids=str,
)
def test_equal_to_loops(options: dict[str, Any]) -> None:
    torch.set_default_dtype(torch.float64)
    module = make(**options)
    ours, theirs = tokens().requires_grad_(), tokens().requires_grad_()
    target = torch.randn(3, 7, 8)
    out, expected = module(ours), by_loops(module, theirs)
    assert torch.allclose(out, expected, rtol=0, atol=EXACT)
    parameters = list(module.parameters())
    mine = torch.autograd.grad((out * target).sum(), [ours, *parameters])
    right = torch.autograd.grad((expected * target).sum(), [theirs, *parameters])
    for one, other in zip(mine, right, strict=True):
        assert torch.allclose(one, other, rtol=0, atol=EXACT)


def test_grouped_products_equal_the_loop() -> None:
    draw = torch.Generator().manual_seed(0)
    counts, counted = torch.tensor([8, 0, 21, 3]), []
    shapes = (32, 16), *[(4, 24, 16)] * 3
    values = [(torch.randn(shape, generator=draw) / 4).bfloat16() for shape in shapes]
    for compute, dtype in ((one_by_one, torch.float32), (one_by_one, None), (grouped, None)):
        x, *weights = (value.detach().to(dtype).requires_grad_() for value in values)
        out = compute(x, counts, *weights)
        counted.append([out, *torch.autograd.grad((out * x.detach()).sum(), [x, *weights])])
    for true, one, other in zip(*counted, strict=True):
        # bf16 may lead as far away from float32 as the loop does on this machine.
        assert (other - true).abs().max() < 2 * (one - true).abs().max()
        assert true.abs().max() > 0.02


def test_an_exported_program_lets_the_router_choose() -> None:
    """torch.export has tensors without values, as `plan` has, which are not shared out evenly."""
    torch.set_default_dtype(torch.float64)
    module, (first, *others) = make().eval(), tokens().unsqueeze(1)
    program = torch.export.export(module, (first,)).module()
    for x in others:
        assert torch.allclose(program(x), module(x), rtol=0, atol=EXACT)


def test_only_backward_passes_count() -> None:
    module, x = make(), tokens().requires_grad_()
    with torch.no_grad():
        module(x)
    module(x)
    module.eval()
    module(x).sum().backward()
    assert module.take_loads().tolist() == [0] * 5
    module.train()
    for _ in range(2):
        module(x).sum().backward()
    loads = module.take_loads()
    assert loads.sum() == 2 * 3 * 7 * 2
    assert module.take_loads().tolist() == [0] * 5


def test_balance_moves_against_the_load() -> None:
    module = make(balance_rate=0.25)
    module.reset_parameters()
    module.move_balance(torch.tensor([4.0, 4.0, 5.0, 3.0, 4.0], dtype=torch.float64))
    assert module.balance.tolist() == [0, 0, -0.25, 0.25, 0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"experts": 4, "experts_per_token": 5}, "experts_per_token=5: it is 1 to experts=4"),
        ({"experts": 4, "expert_scores": "tanh"}, "expert_scores=tanh: it is sigmoid or softmax"),
    ],
)
def test_bad_arguments(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Transformer(50, 32, 2, 4, **options)
