"""`train.sync_batchnorm` gives the batch norms of one process; without it a warning names them."""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import distributed, nn

from hpctrain.config.rules.combinations import parallel_problems
from hpctrain.config.rules.degrees import Degrees
from hpctrain.config.schema import Config
from hpctrain.config.sections import LoopSections
from hpctrain.engine.building.parts import training_of
from hpctrain.engine.parallel.mesh import Mesh
from hpctrain.engine.parallel.preparing.batch_norm import check_filled_up, prepare_batch_norms
from hpctrain.errors import ConfigError
from hpctrain.models import ConvNet
from tests.bounds import EXACT, within
from tests.conftest import run_module
from tests.parallel.parity import Cell, Result, build, difference, whole
from tests.ranks import run_ranks

SYNC = ("train.sync_batchnorm", True)
SHARD = (("parallel.dp_replicate", 1), ("parallel.dp_shard", -1))
TWO = {
    "ddp": (),
    "zero1": (*SHARD, ("parallel.zero", 1)),
    "zero2": (*SHARD, ("parallel.zero", 2)),
    "zero3": (*SHARD, ("parallel.zero", 3)),
    "zero3, checkpointing": (*SHARD, ("train.activation_checkpointing", "full")),
}
HSDP = (("parallel.dp_replicate", 2), ("parallel.dp_shard", 2))


def train(cells: list[Cell]) -> list[Result]:
    """Return the results of this rank; the buffers are among the parameters."""
    found = []
    for cell in cells:
        training = build(cell)
        training.run(cell, cell.steps)
        buffers = dict(training.model.module.named_buffers())
        values = whole(training.model) | {
            name.removeprefix("module."): value.clone() for name, value in buffers.items()
        }
        found.append(Result(training.losses, training.norms, values))
    return found


def cell(ranks: int, *keys: tuple[str, Any]) -> Cell:
    return Cell("conv, batch norm", ranks, keys)


def test_equal_to_one_process() -> None:
    kept = ("train.activation_checkpointing", "full")  # statistics move with each computation
    plain, twice = run_ranks(train, 1, [cell(1), cell(1, kept)])[0]
    cells = [cell(2, SYNC, *keys) for keys in TWO.values()]
    for results in run_ranks(train, 2, [*cells, cell(2)]):
        for name, result in zip(TWO, results[:-1], strict=True):
            expected = twice if "checkpointing" in name else plain
            within(difference(result, expected), EXACT)
        # The batches are such that each rank's own statistics would be noticed.
        assert min(difference(results[-1], plain)) > 1e-4
    for results in run_ranks(train, 4, [cell(4, SYNC, *HSDP)]):
        within(difference(results[0], plain), EXACT)
    assert plain.parameters["blocks.0.first_norm.num_batches_tracked"] == len(plain.losses)
    assert min(plain.norms) > 0.2
    assert plain.losses[0] != plain.losses[-1]


class Activated(nn.BatchNorm2d):
    """As timm's BatchNormAct2d, whose forward function does more than normalise."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        stats = (self.running_mean, self.running_var, self.weight, self.bias)
        return F.batch_norm(x, *stats, self.training, self.momentum or 0.0, self.eps).relu()


class Own(nn.BatchNorm1d):
    """A class that computes the statistics by itself."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x - x.mean(0)) / x.std(0)


def synchronised(model: nn.Module, compile: str = "off") -> None:
    config = Config()
    config.train.sync_batchnorm, config.train.compile = True, compile
    ranks, rank = distributed.get_world_size(), distributed.get_rank()
    mesh = Mesh(Degrees(ranks), rank, torch.device("cpu"))
    prepare_batch_norms(model, mesh, training_of(LoopSections.of(config), mesh))


def passes(model: nn.Module, x: torch.Tensor, grad: torch.Tensor) -> list[torch.Tensor]:
    """Return what follows from a row only, and then what follows from all rows."""
    x = x.clone().requires_grad_()
    outputs = model.train()(x)
    outputs.backward(grad)
    assert x.grad is not None
    of_parameters = [p.grad for p in model.parameters() if p.grad is not None]
    return [outputs.detach(), x.grad, *of_parameters, *model.buffers()]


def compared(dtype: torch.dtype, counts: list[int]) -> float:
    """Return the largest difference between this rank's rows and the same rows in one process."""
    rank = distributed.get_rank()
    torch.manual_seed(3)
    alone, model = (
        nn.Sequential(Activated(4), nn.BatchNorm2d(4, momentum=None)).to(dtype) for _ in range(2)
    )
    synchronised(model)
    x, grad = torch.randn(2, sum(counts), 4, 3, 2, dtype=dtype) * 2 + 3
    own = slice(sum(counts[:rank]), sum(counts[: rank + 1]))
    found, expected = passes(model, x[own], grad[own]), passes(alone, x, grad)
    for gradient in found[2:6]:
        distributed.all_reduce(gradient)
    expected[:2] = [values[own] for values in expected[:2]]
    model.eval()(x)  # eval takes the statistics; with communication rank 1 would wait
    differences = [(a - b).abs() for a, b in zip(found, expected, strict=True) if a.numel()]
    return max(float(difference.max()) for difference in differences)


@pytest.mark.parametrize("counts", [[5, 2], [6, 0], [1, 1]])
def test_uneven_rows_and_other_classes(counts: list[int]) -> None:
    within(run_ranks(compared, 2, torch.float64, counts), EXACT)
    within(run_ranks(compared, 2, torch.float32, counts), 1e-3)


def refused() -> str:
    model = nn.Sequential(nn.Linear(2, 2), Own(2))
    synchronised(model)
    with pytest.raises(ConfigError) as caught:
        model(torch.randn(3, 2))
    return str(caught.value)


def test_a_class_that_computes_by_itself_is_refused() -> None:
    for text in run_ranks(refused, 2):
        assert "sync_batchnorm=true: 1 (Own) does not call torch.nn.functional.batch_norm" in text


def groups() -> list[int]:
    mesh = Mesh(Degrees(2, tp=2), distributed.get_rank(), torch.device("cpu"))
    found = distributed.get_process_group_ranks(mesh.batch_group)
    distributed.barrier()  # a rank that leaves early breaks the connections that others make
    return found


def test_ranks_that_divide_a_layer_are_in_different_groups() -> None:
    assert run_ranks(groups, 4) == [[0, 2], [1, 3], [0, 2], [1, 3]]


def said(
    model: nn.Module,
    caplog: pytest.LogCaptureFixture,
    ranks: int = 1,
    trains: bool = True,
    **train: Any,
) -> str:
    """Return the warning of rank 0."""
    config = Config()
    config.model = {"norm": "batch"}
    for name, value in train.items():
        setattr(config.train, name, value)
    caplog.clear()
    if ranks == 1 or not config.train.sync_batchnorm:
        mesh = Mesh(Degrees(ranks), 0, torch.device("cpu"))
        training = training_of(LoopSections.of(config), mesh, says=trains)
        prepare_batch_norms(model, mesh, training)
    return "\n".join(record.getMessage() for record in caplog.records)


@pytest.mark.usefixtures("group_of_one")
def test_a_warning_names_the_first_layer_and_a_cure(caplog: pytest.LogCaptureFixture) -> None:
    model = ConvNet(1, [8, 16], 10, "batch")
    text = said(model, caplog, ranks=2)
    assert "blocks.0.first_norm (BatchNorm2d) and 3 more layers" in text
    assert "that one of 2 data-parallel ranks has" in text
    assert "(train.sync_batchnorm=true), or take a norm" in text
    assert "(model.norm=group)" in text
    text = said(model, caplog, accumulate=4)
    assert "that one of 4 micro-batches has" in text
    assert "sync_batchnorm" not in text  # the key would change nothing
    assert "one of 2 data-parallel ranks and one of 4 micro-batches" in said(
        model, caplog, ranks=2, accumulate=4
    )
    assert "one micro-batch has" in said(model, caplog, micro_batch_size="auto")
    assert "4 micro-batches" in said(model, caplog, accumulate=4, sync_batchnorm=True)
    lazy = nn.Sequential(nn.LazyBatchNorm2d(), nn.InstanceNorm2d(4, track_running_stats=True))
    assert "0 (LazyBatchNorm2d) and 1 more layer" in said(lazy, caplog, ranks=2)
    # torch's own class needs the warning only for micro-batches.
    assert "0 (SyncBatchNorm) are" in said(nn.Sequential(nn.SyncBatchNorm(4)), caplog, accumulate=2)
    for quiet in (
        said(model, caplog),
        said(model, caplog, ranks=2, trains=False, accumulate=4),  # it only evaluates
        said(ConvNet(1, [8], 10), caplog, ranks=2, accumulate=4),
        said(nn.Sequential(nn.SyncBatchNorm(4)), caplog, ranks=2),
        said(nn.InstanceNorm2d(4), caplog, ranks=2),
        said(nn.Sequential(nn.BatchNorm2d(4).eval()), caplog, ranks=2),
    ):
        assert quiet == ""


@pytest.mark.parametrize(
    ("key", "value"),
    [("parallel.pp", 2), ("parallel.weights", [2, 1]), ("train.local_sgd.every", 4)],
)
def test_what_it_cannot_be_combined_with(key: str, value: Any) -> None:
    config = Config()
    config.train.sync_batchnorm, config.train.accumulate = True, 4
    section, _, name = key.rpartition(".")
    setattr(functools.reduce(getattr, section.split("."), config), name, value)
    (problem,) = parallel_problems(config, Degrees.of(config.parallel, 4))
    assert f"train.sync_batchnorm=true with {key}={value}: " in problem


@pytest.mark.usefixtures("group_of_one")
def test_rows_that_fill_up_a_batch_are_refused_where_statistics_would_count_them() -> None:
    text = (
        r"data\.tail=pad .* the statistics of blocks\.0\.first_norm \(BatchNorm2d\) and 3 more "
        r"layers would count them: use data\.tail=drop, .*\(model\.norm=group\)"
    )
    model = ConvNet(1, [8, 16], 10, "batch")
    for wrapped in (model, nn.ModuleDict({"module": model})):
        with pytest.raises(ConfigError, match=text):
            check_filled_up(wrapped, "batch")
    for counting in (nn.SyncBatchNorm(4), nn.InstanceNorm2d(4, track_running_stats=True)):
        with pytest.raises(ConfigError, match=type(counting).__name__):
            check_filled_up(nn.Sequential(counting), "batch")
    for fine in (ConvNet(1, [8], 10), nn.Sequential(nn.BatchNorm2d(4).eval()), nn.LayerNorm(4)):
        check_filled_up(fine, "batch")


def stages(model: nn.Module) -> str:
    """Let only the last rank have a batch norm, as a stage of a pipeline has."""
    here = model if distributed.get_rank() == 1 else nn.Linear(2, 2)
    with pytest.raises(ConfigError) as caught:
        check_filled_up(here, None)
    return str(caught.value)


def test_all_ranks_refuse_for_a_layer_of_one_of_them() -> None:
    first, second = run_ranks(stages, 2, nn.Sequential(nn.BatchNorm1d(2)))
    assert first == second
    assert "the statistics of 0 (BatchNorm1d) would" in first


@pytest.mark.slow
def test_a_run_is_refused_only_if_a_batch_is_filled_up(digits: Path, tmp_path: Path) -> None:
    given = ["experiment=digits", f"data.path={digits}", f"output_dir={tmp_path}", "data.tail=pad"]
    given += ["model=convnet", "model.widths=[8]", "model.norm=batch", "tracking.enabled=false"]
    done = run_module("hpctrain", *given, "train.max_epochs=1", code=2)
    assert "the statistics of blocks.0.first_norm (BatchNorm2d) and 1 more layers" in done.stderr
    run_module("hpctrain", *given, "train.max_steps=3")  # the epoch does not end
    run_module("hpctrain", *given, "train.max_epochs=1", "model.norm=group")
