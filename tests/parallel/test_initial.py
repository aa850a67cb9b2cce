"""Initial parameters equal those of one process bit by bit, however the model is divided."""

import functools
from typing import Any

import pytest
import torch
from torch import distributed, nn

from hpctrain.config.rules.degrees import Degrees
from hpctrain.config.schema import Config, FSDPConfig, ParallelConfig
from hpctrain.config.sections import LoopSections
from hpctrain.engine.building.parts import training_of
from hpctrain.engine.parallel.mesh import Mesh
from hpctrain.engine.parallel.precision import Precision
from hpctrain.engine.parallel.preparing.initial import fill, skeleton
from hpctrain.engine.parallel.recipe import parallelize
from hpctrain.models import MLP, ConvNet, Transformer
from tests.parallel.parity import either, initialised, spread, whole
from tests.ranks import run_ranks
from tests.steps import setup_of

SHARDED = ParallelConfig(dp_replicate=1, dp_shard=-1)
ALONE = Mesh(Degrees(), 0, torch.device("cpu"))
HYBRID = ParallelConfig(dp_replicate=2, dp_shard=2)


class Own(nn.Module):
    """A user's model with tied weights, and with buffers inside and outside the state."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.norm = nn.BatchNorm1d(6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        nn.init.constant_(self.layers[1].bias, 0.5)
        self.register_buffer("scale", torch.rand(3), persistent=False)


class Reads(Own):
    """A model that cannot be built on the meta device."""

    def __init__(self) -> None:
        super().__init__()
        self.rates = [rate.item() for rate in torch.linspace(0, 1, 3)]


class Elsewhere(Transformer):
    """Ranks draw other numbers, as on GPUs with other numbers of multiprocessors."""

    def init_module(self, module: nn.Module) -> None:
        super().init_module(module)
        for value in (*module.parameters(False), *module.buffers(False)):
            value += distributed.get_rank()


class ReadsElsewhere(Reads):
    """The same for a model that every rank builds."""

    def __init__(self) -> None:
        super().__init__()
        nn.init.constant_(self.embed.weight, distributed.get_rank())
        self.scale += distributed.get_rank()
        self.waves = nn.Parameter(torch.full((2, 2), 1j * distributed.get_rank()).T)


class Lacks(MLP):
    """A model with a module that cannot be initialised; the second of two ranks draws it."""

    def __init__(self) -> None:
        super().__init__(5, [7], 3)
        self[3].reset_parameters = None


class Scaled(Transformer):
    """A model with a parameter that FSDP2 cannot divide."""

    def __init__(self) -> None:
        super().__init__(13, 8, 2, 2, experts=2)
        self.factor = nn.Parameter(torch.empty(()))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.factor, 3.0)


MODELS: dict[str, Any] = {
    "transformer": functools.partial(Transformer, 13, 8, 2, 2, tied=True),
    "gpt2": functools.partial(
        Transformer, 13, 8, 2, 2, norm="layer", mlp="gelu", learned_positions=8, bias=True
    ),
    "conv": functools.partial(ConvNet, 1, [8, 8], 3, "batch"),
    "mlp": functools.partial(MLP, 5, [7, 7], 3),
    "own": Own,
    "reads": Reads,
    "scaled": Scaled,
}
OTHERS: dict[str, Any] = {
    "elsewhere": functools.partial(Elsewhere, 13, 8, 2, 2, experts=4),
    "reads elsewhere": ReadsElsewhere,
    "lacks": Lacks,
}


def build(name: str, parallel: ParallelConfig, params: str) -> tuple[dict[str, Any], bool]:
    config = Config(seed=5, parallel=parallel)
    config.precision.params = params
    model = spread((MODELS | OTHERS)[name], config)
    module = getattr(model.module, "module", model.module)  # without the wrapper of DDP
    values = whole(model) | {name: value.clone() for name, value in module.named_buffers()}
    tied = "own" not in name or module.head.weight is module.embed.weight
    return {name.removeprefix("module."): value for name, value in values.items()}, tied


@pytest.mark.parametrize(
    ("name", "params"),
    either(
        [*((name, "fp32") for name in MODELS), ("gpt2", "bf16")],
        [(name, "bf16") for name in MODELS if name != "gpt2"],
        several=True,
    ),
)
def test_equal_bit_by_bit(name: str, params: str) -> None:
    ((expected, _),) = run_ranks(build, 1, name, ParallelConfig(), params)
    assert any(value.abs().sum() > 0 for value in expected.values())
    layouts = [(2, ParallelConfig()), (2, SHARDED)]
    if name not in ("gpt2", "conv", "mlp"):  # which are made in the same way as the transformer
        layouts.append((4, HYBRID))
    for ranks, parallel in layouts:
        for values, tied in run_ranks(build, ranks, name, parallel, params):
            assert tied
            assert values.keys() == expected.keys()
            for key, value in values.items():
                assert value.dtype == expected[key].dtype
                assert torch.equal(value, expected[key]), key


@pytest.mark.usefixtures("group_of_one")
def test_another_seed_draws_other_parameters() -> None:
    made = [spread(MODELS["mlp"], Config(seed=seed)) for seed in (1, 2)]
    assert not torch.equal(made[0].parameters[0], made[1].parameters[0])
    first, second = made[0].parameters[2], made[0].parameters[4]
    assert not torch.equal(first.flatten()[:21], second.flatten()), "each module draws its own"


@pytest.mark.parametrize("name", ["elsewhere", "reads elsewhere"])
def test_replicas_are_equal_on_machines_that_draw_other_numbers(name: str) -> None:
    (expected, _), *others = run_ranks(build, 4, name, HYBRID, "fp32")
    assert len(others) == 3
    for values, _ in others:
        assert values.keys() == expected.keys()
        for key, value in values.items():
            assert torch.equal(value, expected[key]), key


def refused() -> str:
    with pytest.raises(TypeError) as error:
        build("lacks", SHARDED, "fp32")
    return str(error.value)


def test_all_ranks_say_which_module_cannot_be_initialised() -> None:
    """The other rank would wait for its values."""
    assert run_ranks(refused, 2) == ["Linear has no reset_parameters"] * 2


def test_numbers_are_drawn_on_the_cpu() -> None:
    """A GPU would draw others. The meta device stands for it: it would lose the numbers."""
    meta, cpu = torch.device("meta"), torch.device("cpu")
    expected = initialised(Scaled, 5, torch.float32, cpu).state_dict()
    model = skeleton(Scaled, 5)
    assert model is not None
    setup = setup_of(Scaled, Mesh(Degrees(), 0, meta), seed=5)
    setup.storage = cpu
    fill(setup, model, "by modules")
    for name, parameter in model.named_parameters():
        if name != "factor":
            assert torch.equal(parameter, expected[name]), name


def test_values_are_those_of_the_original_classes() -> None:
    """torchao replaces linear layers before a sharded model has values; nn.Linear has others."""
    build = functools.partial(Transformer, 16, 8, 1, 2, bias=True)
    expected = initialised(build, 5, torch.float32, torch.device("cpu")).state_dict()
    model: Any = skeleton(build, 5)
    mlp = model.layers[0].mlp
    mlp.up, before = nn.Linear(8, 32, device="meta"), mlp.up
    mlp.up.weight, mlp.up.bias = before.weight, before.bias
    fill(setup_of(build, ALONE, seed=5), model, "by modules")
    for name, value in model.state_dict().items():
        assert torch.equal(value, expected[name]), name
    assert mlp.up.bias.abs().sum() == 0
    assert mlp.up.weight.abs().sum() > 0


class Expanded(Transformer):
    """A buffer is one number that stands for all, as the weights that QLoRA has freed are."""

    def __init__(self) -> None:
        super().__init__(16, 8, 1, 2)
        self.register_buffer("ones", torch.ones(()).expand(3, 3))

    def reset_parameters(self) -> None:
        self.get_buffer("ones").fill_(1)


def test_a_buffer_that_a_model_has_expanded_has_values() -> None:
    model: Any = skeleton(Expanded, 5)
    fill(setup_of(Expanded, ALONE, seed=5), model, "by modules")
    assert torch.equal(model.ones, torch.ones(3, 3))


def placed() -> dict[str, str]:
    """Return where an offloaded model's parameters and buffers are; "meta" is the rank's device."""
    parallel = ParallelConfig(dp_replicate=1, fsdp=FSDPConfig(offload=True))
    config, cpu = Config(parallel=parallel), torch.device("cpu")
    precision = Precision(config.precision, torch.device("meta"))
    places = {}
    for name, made in (("scaled", Scaled), ("conv", MODELS["conv"])):
        mesh = Mesh(Degrees(), 0, cpu)
        how = config.parallel, mesh, precision, training_of(LoopSections.of(config), mesh)
        module = parallelize(made, *how).module
        values = (*module.named_parameters(), *module.named_buffers())
        places |= {f"{name} {key}": value.device.type for key, value in values}
    return places


def test_offload_leaves_buffers_on_the_device() -> None:
    """What computes has to be on one device; FSDP2 brings only the parameters that it divides."""
    (places,) = run_ranks(placed, 1)
    stay = {name for name, device in places.items() if device == "meta"}
    layers = {f"conv blocks.{i}.{norm}_norm" for i in (0, 1) for norm in ("first", "second")}
    statistics = ("running_mean", "running_var", "num_batches_tracked")
    assert stay == {
        *(f"{layer}.{key}" for layer in layers for key in statistics),
        *(f"scaled layers.{i}.mlp.balance" for i in (0, 1)),
        "scaled factor",
    }
    assert "scaled embed.weight" in places
