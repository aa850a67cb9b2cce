"""Models in a loop of one's own are trained over ranks as in one process, and saved by name."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from hpctrain.config.rules.degrees import Degrees
from hpctrain.config.schema import ParallelConfig, PrecisionConfig
from hpctrain.engine.checkpoint.checkpointer import Checkpointer
from hpctrain.engine.parallel.mesh import Mesh
from hpctrain.engine.parallel.own_loop import follow, spread
from hpctrain.engine.parallel.precision import Precision
from hpctrain.engine.parallel.wrappers.parallel_model import ParallelModel
from hpctrain.errors import ConfigError, MisfitError
from tests.bounds import EXACT, within
from tests.parallel.parity import either
from tests.ranks import run_ranks
from tests.steps import CPU, config_with, here

ROWS, STEPS, SAVED = 8, 4, 2
FP64 = PrecisionConfig("fp64", "fp64")
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "alone": (1, {}),
    "ddp": (2, {"ddp.find_unused_parameters": True}),
    **{f"zero{n}": (2, {"dp_replicate": 1, "dp_shard": 2, "zero": n}) for n in (1, 2, 3)},
    "hsdp": (4, {"dp_replicate": 2, "dp_shard": 2}),
}
Held = dict[str, torch.Tensor]


class Critic(nn.Module):
    """Blocks, a scalar that FSDP2 cannot divide, and a head that no loss uses."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.head, self.unused = nn.Linear(6, 1), nn.Linear(6, 3)
        self.scale = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        out: torch.Tensor = self.head(x) * self.scale
        return out


def models(layout: str, seed: int = 0) -> dict[str, ParallelModel]:
    """Return a generator without blocks, a critic and a frozen average on the present ranks."""
    torch.set_default_dtype(torch.float64)
    keys = {f"parallel.{key}": value for key, value in LAYOUTS[layout][1].items()}
    parallel = config_with(keys).parallel
    mesh = Mesh(Degrees.of(parallel, dist.get_world_size()), dist.get_rank(), CPU)
    torch.manual_seed(seed + dist.get_rank())  # the values of rank 0 count
    made: dict[str, nn.Module] = {
        "g": nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5).eval(), nn.Tanh(), nn.Linear(5, 6)),
        "d": Critic(),
        "slow": Critic().eval().requires_grad_(False),
    }
    held = {n: spread(m, parallel, mesh, Precision(FP64, CPU)) for n, m in made.items()}
    assert not held["slow"].module.training
    return held


def train(layout: str, folder: Path, resumes: bool = False) -> tuple[list[float], Held]:
    """Train a GAN with a gradient penalty; save after some steps, or go on from there."""
    held = models(layout, seed=9 if resumes else 0)
    g, d, slow = (held[name].module for name in ("g", "d", "slow"))
    optimizers = {
        "og": torch.optim.AdamW(g.parameters(), 1e-2, weight_decay=0.1),
        # Two of one model: neither may take away the gradients of the other.
        "od": torch.optim.SGD([*d.parameters()][:2], 0.1, momentum=0.9, weight_decay=0.1),
        "rest": torch.optim.AdamW([*d.parameters()][2:], 1e-2, weight_decay=0.1, eps=1e-4),
    }
    for optimizer in optimizers.values():
        follow(optimizer, held.values())
    checkpoints = Checkpointer(folder, 2, here(), held, optimizers)
    if resumes:
        assert checkpoints.load_latest() == {"step": SAVED}
    losses, (rank, ranks) = [], (dist.get_rank(), dist.get_world_size())
    for number in range(SAVED if resumes else 0, STEPS):
        for model in held.values():
            model.begin_step()
        draw = torch.Generator().manual_seed(number)
        x, z = (torch.randn(ROWS, n, generator=draw).chunk(ranks)[rank] for n in (6, 4))
        for _ in range(1 + number // 3):  # the last step has more passes than those before
            with torch.no_grad():
                fake = g(z)
            mixed = (x + fake).requires_grad_()
            (slope,) = torch.autograd.grad(d(mixed).sum(), mixed, create_graph=True)
            d_loss = d(fake).mean() - d(x).mean() + (slope**2).mean()
            d_loss.backward()
            for name in ("od", "rest"):
                optimizers[name].step()
            d.zero_grad()
        g_loss = (slow(g(z)) ** 2).mean() - d(g(z)).mean()
        g_loss.backward()
        optimizers["og"].step()
        for module in (g, d):
            module.zero_grad()
        with torch.no_grad():
            d(slow(x).expand(-1, 6))  # what these passes gather is not what the average changes
            for mean, parameter in zip(slow.parameters(), d.parameters(), strict=True):
                mean.mul_(0.9).add_(parameter, alpha=0.1)
        loss = torch.stack([d_loss, g_loss]).detach()
        dist.all_reduce(loss)
        losses += (loss / ranks).tolist()
        if number == SAVED - 1:
            checkpoints.save(SAVED, {"step": SAVED})
    whole = {}
    for name, model in held.items():
        for own, value in zip(model.names, model.parameters, strict=True):
            full = value.full_tensor() if isinstance(value, DTensor) else value
            whole[f"{name}.{own}"] = full.detach()
    return losses, whole


def compare(found: tuple[list[float], Held], expected: tuple[list[float], Held]) -> None:
    losses = expected[0][-len(found[0]) :]
    within((abs(a - b) for a, b in zip(found[0], losses, strict=True)), EXACT)
    assert found[1].keys() == expected[1].keys()
    within((float((found[1][n] - p).abs().max()) for n, p in expected[1].items()), EXACT)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, tuple[list[float], Held]]:
    folder = tmp_path_factory.mktemp("alone")
    return folder, run_ranks(train, 1, "alone", folder)[0]


@pytest.mark.parametrize("layout", either(["ddp", "zero1"], ["zero2", "zero3", "hsdp"]))
def test_equal_to_one_process(layout: str, tmp_path: Path, expected: Any) -> None:
    ranks = LAYOUTS[layout][0]
    for found in run_ranks(train, ranks, layout, tmp_path):
        compare(found, expected[1])
    # One process goes on from what the ranks have saved, and they from what it has saved.
    compare(run_ranks(train, 1, "alone", tmp_path, True)[0], expected[1])
    for found in run_ranks(train, ranks, layout, expected[0], True):
        compare(found, expected[1])


def refusals(folder: Path) -> list[str]:
    held = models("alone")
    adam = torch.optim.AdamW([*held["g"].module.parameters(), nn.Parameter(torch.ones(3))])
    texts = list[str]()
    with pytest.raises(ConfigError) as refused:
        follow(adam, held.values())
    texts.append(str(refused.value))
    parallel, mesh = ParallelConfig(tp=2), Mesh(Degrees(tp=2), 0, CPU)
    with pytest.raises(ConfigError) as refused:
        spread(nn.Linear(2, 2), parallel, mesh, Precision(FP64, CPU))
    texts.append(str(refused.value))
    fp16 = Precision(PrecisionConfig("fp16"), CPU)
    with pytest.raises(ConfigError) as refused:
        spread(nn.Linear(2, 2), ParallelConfig(), Mesh(Degrees(), 0, CPU), fp16)
    texts.append(str(refused.value))
    for given, optimizers in (
        ({"g": held["g"]}, {}),
        (held, {"other": torch.optim.SGD(held["g"].module.parameters())}),
    ):
        with pytest.raises(MisfitError) as misfit:
            Checkpointer(folder, 2, here(), given, optimizers).load_latest()
        texts.append(str(misfit.value))
    return texts


def test_what_cannot_be_is_refused(tmp_path: Path, expected: Any) -> None:
    (texts,) = run_ranks(refusals, 1, expected[0])
    for text, part in zip(
        texts,
        (
            "1 parameters of no model of the session, the first of shape (3,)",
            "parallel.tp=2: the loop would have to",
            "precision.compute=fp16",
            "d.blocks.0.bias is not in the model",
            "has the optimizers od, og, rest, and this run has other",
        ),
        strict=True,
    ):
        assert part in text


def in_bf16() -> torch.dtype:
    precision = Precision(PrecisionConfig("bf16"), CPU)
    torch.set_default_dtype(torch.float32)
    model = spread(nn.Linear(4, 4), ParallelConfig(), Mesh(Degrees(), 0, CPU), precision)
    x = torch.randn(2, 4)
    found = model.module(x)
    assert not torch.equal(found, nn.functional.linear(x, *model.module.parameters()))
    return torch.as_tensor(found).dtype


def test_bf16_is_within_the_module() -> None:
    assert run_ranks(in_bf16, 1) == [torch.float32]
