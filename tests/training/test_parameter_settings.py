"""Groups of parameters by pattern, layer-wise decay, and optimizers that get names."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hpctrain.config.rules.parameter_rules import problems
from hpctrain.config.schema import LoRAConfig, OptimizerConfig
from hpctrain.engine.building.build_optimizer import build_optimizer
from hpctrain.engine.checkpoint.checkpointer import Checkpointer
from hpctrain.engine.parallel.preparing.whole_model import Setting, check_layers, freeze
from hpctrain.errors import ConfigError
from tests.steps import ALONE, alone


class Net(nn.Module):
    """An embedding, three blocks, and a head that has the weights of the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 4)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.head = nn.Linear(4, 4)
        self.head.weight = self.stem.weight


def groups_of(**keys: Any) -> dict[str, Setting]:
    return freeze(Net(), OptimizerConfig(**keys), [], LoRAConfig())


def test_all_rules_that_match_count_and_the_last_one_decides() -> None:
    rules = [
        {"match": "*.bias", "weight_decay": 0},
        {"match": ["layers.1.*", "layers.2.*"], "lr_factor": 0.1},
        {"match": "layers.2.*", "lr_factor": 0.5},
        {"match": "head.weight", "freeze": True},
        {"match": "layers.0.*", "options": {"betas": [0.8, 0.9], "eps": 1e-6}},
        {"match": "*.0.bias", "options": {"eps": 1e-5}},
    ]
    found = groups_of(groups=rules)
    assert found["layers.0.weight"].options == (("betas", (0.8, 0.9)), ("eps", 1e-6))
    assert found["layers.0.bias"].options == (("betas", (0.8, 0.9)), ("eps", 1e-5))
    assert found["layers.1.bias"] == Setting(0.1, 0)
    assert found["layers.2.weight"] == Setting(0.5)
    assert found["head.weight"] == found["stem.weight"] == Setting(freeze=True), "they are one"
    assert groups_of() == {}


def test_layer_decay_counts_layers_from_the_end() -> None:
    found = groups_of(layer_decay=0.5, groups=[{"match": "layers.0.bias", "lr_factor": 10.0}])
    factors = {name: setting.lr_factor for name, setting in found.items()}
    assert factors["stem.weight"] == factors["stem.bias"] == 0.5**4
    assert [factors[f"layers.{i}.weight"] for i in range(3)] == [0.5**3, 0.5**2, 0.5]
    assert (factors["layers.0.bias"], factors["head.bias"]) == (10 * 0.5**3, 1.0)


@pytest.mark.parametrize(
    ("rules", "said"),
    [
        (
            [{"match": "*.bias", "weight_decay": 0}, {"match": "layer.1.*", "lr_factor": 2}],
            r"optimizer.groups\[1\].match=layer.1.\*: the model has no parameter with such a name; "
            r"did you mean layers.1.\* or",
        ),
        ([{"match": "*", "freeze": True}], "no parameter is left to be trained"),
    ],
)
def test_what_fits_no_parameter_is_refused(rules: list[dict[str, Any]], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        groups_of(groups=rules)


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        ({"match": "*", "lr": 1, "freeze": True}, "optimizer.groups[0].lr is unknown: a group"),
        ({"lr_factor": 1}, "optimizer.groups[0].match=None: it must be a pattern"),
        ({"match": "*", "lr_factor": 0}, "optimizer.groups[0].lr_factor=0: it must be a number gr"),
        ({"match": "*", "weight_decay": "a"}, "optimizer.groups[0].weight_decay=a: it must be a"),
        ({"match": "*", "freeze": 1}, "optimizer.groups[0].freeze=1: it must be true or false"),
        ({"match": "*"}, "optimizer.groups[0]={'match': '*'}: it changes nothing; give lr_factor"),
        ({"match": "*", "options": [1]}, "optimizer.groups[0].options=[1]: it must be the names"),
        (
            {"match": "*", "options": {"beta": [0.9, 0.98]}},
            "optimizer.groups[0].options.beta=[0.9, 0.98]: torch.optim.AdamW has no argument beta; "
            "did you mean betas? it has lr, betas, eps,",
        ),
        (
            {"match": "*", "options": {"eps": "small"}},
            "optimizer.groups[0].options.eps=small: torch.optim.AdamW takes eps: float",
        ),
        (
            {"match": "*", "options": {"lr": 0.1}},
            "optimizer.groups[0].options.lr=0.1: give lr_factor of the group in place of it",
        ),
    ],
)
def test_a_rule_that_says_nothing_sensible_is_refused(rule: dict[str, Any], said: str) -> None:
    (problem,) = problems(OptimizerConfig(groups=[rule]))
    assert problem.startswith(said)


@pytest.mark.parametrize(
    ("target", "weight_decay", "said"),
    [
        ("torch.optim.LBFGS", 0.0, "optimizer._target_=torch.optim.LBFGS needs a closure that"),
        ("torch.optim.SparseAdam", 0.0, "optimizer._target_=torch.optim.SparseAdam needs sparse"),
        ("torch.optim.Rprop", 0.1, "optimizer.weight_decay=0.1: torch.optim.Rprop has no weight"),
        ("torch.optim.Rprop", 0.0, ""),
        ("torch.optim.ASGD", 0.1, ""),
    ],
)
def test_what_an_optimizer_needs_or_lacks_is_known_before_it_is_made(
    target: str, weight_decay: float, said: str
) -> None:
    found = "".join(problems(OptimizerConfig(target, weight_decay=weight_decay)))
    assert found.startswith(said)
    assert bool(found) == bool(said)


@pytest.mark.usefixtures("group_of_one")
def test_an_optimizer_without_weight_decay_gets_none() -> None:
    optimizer = build_optimizer(OptimizerConfig("torch.optim.Rprop", lr=0.1), alone(Net()))
    assert isinstance(optimizer, torch.optim.Rprop)
    rules: list[dict[str, Any]] = [{"match": "*.bias", "weight_decay": 0.1}]
    (problem,) = problems(OptimizerConfig("torch.optim.Rprop", groups=rules))
    assert problem.startswith("optimizer.groups[0].weight_decay=0.1: torch.optim.Rprop has no")


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
@pytest.mark.parametrize(
    ("layer", "said"),
    [
        (
            lambda: nn.LazyLinear(3),
            r"the layer 0 \(LazyLinear\) learns its sizes from the first batch",
        ),
        (lambda: nn.LazyConv2d(3, 1), r"\(LazyConv2d\) learns .* Use Conv2d with its sizes"),
        (lambda: nn.LazyBatchNorm1d(), r"\(LazyBatchNorm1d\) learns its sizes"),
        (lambda: nn.Embedding(3, 2, sparse=True), r"the layer 0 \(Embedding\) has sparse=True"),
        (lambda: nn.EmbeddingBag(3, 2, sparse=True, mode="sum"), "give sparse=False"),
    ],
)
def test_layers_that_cannot_be_divided_are_refused(
    layer: Callable[[], nn.Module], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        check_layers(nn.Sequential(layer()))
    check_layers(nn.Sequential(nn.Embedding(3, 2), nn.BatchNorm1d(2)))


def named(named_parameters: Any, lr: float, weight_decay: float) -> torch.optim.Optimizer:
    """An optimizer of a user, which makes the groups by the names."""
    heads = [(name, p) for name, p in named_parameters if name.startswith("head")]
    rest = [(name, p) for name, p in named_parameters if not name.startswith("head")]
    return torch.optim.AdamW(
        [{"params": rest}, {"params": heads, "lr": 10 * lr}], lr=lr, weight_decay=weight_decay
    )


@pytest.mark.usefixtures("group_of_one")
def test_an_optimizer_gets_names_groups_or_parameters(tmp_path: Path) -> None:
    rules: list[dict[str, Any]] = [
        {"match": "*.bias", "weight_decay": 0},
        {"match": "stem.bias", "freeze": True},
        {"match": "head.bias", "options": {"betas": [0.5, 0.6]}},
    ]
    config = OptimizerConfig(lr=0.1, weight_decay=0.5, groups=rules)
    module = Net()
    chosen = freeze(module, config, [], LoRAConfig())
    model = alone(module)
    model.settings = chosen
    assert "stem.bias" not in model.names
    groups = build_optimizer(config, model).param_groups
    found = [(len(g["params"]), g["weight_decay"], g["betas"]) for g in groups]
    assert found == [(4, 0.5, (0.9, 0.999)), (3, 0, (0.9, 0.999)), (1, 0, (0.5, 0.6))]
    config.groups = [{"match": "*", "options": {"beta": 1}}]
    with pytest.raises(ConfigError, match=r"groups\[0\].options.beta: the groups of torch.optim"):
        build_optimizer(config, model)
    config = OptimizerConfig(f"{__name__}.named", lr=0.1)
    (problem,) = problems(OptimizerConfig(f"{__name__}.named", layer_decay=0.5))
    assert "makes the groups itself" in problem
    optimizer = build_optimizer(config, model)
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 1.0]
    checkpointer = Checkpointer(tmp_path, 2, ALONE, model, optimizer)
    checkpointer.save(1, {})
    assert checkpointer.load_latest() == {}
