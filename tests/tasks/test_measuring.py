"""Metrics of torchmetrics: in every layout they are those of one process over all samples."""

from typing import Any

import pytest
import torch
from torch import distributed, nn

from hpctrain.config.rules.degrees import Degrees
from hpctrain.engine.parallel.mesh import Mesh
from hpctrain.engine.parallel.reducing.metric_states import MeasuredTask
from hpctrain.engine.parallel.wrappers.parallel_model import ParallelModel
from hpctrain.errors import ConfigError
from hpctrain.tasks import Classification, MultiLabel, Regression, measuring
from tests.ranks import run_ranks
from tests.steps import setup_of

CPU = torch.device("cpu")
CLASSES, ROWS = 4, 23


class Same(nn.Module):
    """A model that returns its input."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def made(kind: str) -> tuple[Any, dict[str, torch.Tensor]]:
    """Return a task with metrics of every kind of state, and all samples."""
    from tests.tasks.light import torchmetrics

    draw = torch.Generator().manual_seed(0)
    x = torch.randn(ROWS, CLASSES, generator=draw)
    given: dict[str, Any] = {"task": "multiclass", "num_classes": CLASSES}
    if kind == "classes":
        metrics = {
            "auroc": torchmetrics.AUROC(**given),  # lists of samples
            "binned": torchmetrics.AUROC(**given, thresholds=20),  # a sum
            "f1": torchmetrics.F1Score(**given, average="macro"),
            "half": torchmetrics.AUROC(**given) * 0.5,  # a list in a metric inside
        }
        task: Any = Classification("x", "y", metrics=metrics)
        y = torch.randint(0, CLASSES, (ROWS,), generator=draw)
    elif kind == "labels":
        task = MultiLabel(
            "x", "y", metrics={"ap": torchmetrics.AveragePrecision("multilabel", num_labels=4)}
        )
        y = torch.randint(0, 2, (ROWS, CLASSES), generator=draw)
    else:
        metrics = {
            "pearson": torchmetrics.PearsonCorrCoef(),  # states that are not reduced
            "r2": torchmetrics.R2Score(),
            "scaled": torchmetrics.MeanSquaredError() * 2,  # metrics inside
        }
        task = Regression("x", "y", metrics=metrics)
        x, y = x[:, 0], torch.randn(ROWS, generator=draw)
    return task, {"x": x, "y": y}


def kept(more: Any = None) -> Any:
    """Return a metric with a list that is not joined."""
    from tests.tasks.light import torchmetrics

    class Longest(torchmetrics.Metric):
        def __init__(self) -> None:
            super().__init__()
            self.add_state("rows", default=[], dist_reduce_fx=None)

        def update(self, rows: torch.Tensor, _: torch.Tensor) -> None:
            self.rows += [*rows] if more is None else [more]

        def compute(self) -> torch.Tensor:
            return torch.stack(self.rows).max()

    return Longest()


def evaluated(kind: str, degrees: Degrees, batch: int = 4) -> dict[str, float]:
    """Evaluate as a trainer does. A rank has every dp-th row; the last batches are padded."""
    mesh = Mesh(degrees, distributed.get_rank(), CPU)
    task, whole = made(kind)
    model = ParallelModel(Same(), setup_of(Same, mesh))
    found: list[dict[str, float]] = []
    # An evaluation that is stopped midway leaves nothing, nor does one that was made.
    for stopped in (True, False, False):
        measured = MeasuredTask(task, mesh)
        mine = [*range(mesh.dp_rank, ROWS, mesh.dp_size)]
        mine = mine if mesh.dp_rank < 2 else []  # a rank without samples
        for first in range(0, len(mine) or 1, batch):
            rows = mine[first : first + batch]
            padded = torch.tensor(rows + [0] * (batch - len(rows)))
            mask = torch.arange(batch) < len(rows)
            model.evaluate(measured.task, {n: v[padded] for n, v in whole.items()} | {"mask": mask})
            measured.update()
            if stopped:
                break
        else:
            found.append(measured.values())
    assert found[0] == found[1]
    return found[0]


KINDS = ("classes", "labels", "numbers")


def all_kinds(degrees: Degrees) -> list[dict[str, float]]:
    return [evaluated(kind, degrees) for kind in KINDS]


def expected(kind: str, rows: list[int]) -> dict[str, float]:
    """Return what torchmetrics itself says of the rows."""
    task, whole = made(kind)
    batch = {name: value[rows] for name, value in whole.items()}
    arguments = task.measured(batch["x"], batch)
    for metric in task.metrics.values():
        metric.update(*arguments)
    return {name: float(metric.compute()) for name, metric in task.metrics.items()}


class Texts(Classification):
    """Its metric gets a text and a dict of boxes for each sample."""

    def measured(self, outputs: torch.Tensor, batch: dict[str, torch.Tensor]) -> Any:
        boxes = [{"boxes": row, "n": 1} for row in outputs]
        return [f"{n}" for n in batch["y"].tolist()], boxes if self.scale == 1 else tuple(boxes)


def test_lists_are_measured_and_anything_else_is_described() -> None:
    from tests.tasks.light import torchmetrics

    class Seen(torchmetrics.Metric):
        def update(self, texts: list[str], boxes: list[Any]) -> None:
            got.extend(zip(texts, boxes, strict=True))

        def compute(self) -> int:
            return len(got)

    got: list[tuple[str, Any]] = []
    batch = {"x": torch.eye(3, requires_grad=True), "y": torch.tensor([2, 0, 1])}
    batch["mask"] = torch.tensor([True, False, True])
    task = measuring(Texts("x", "y", metrics={"seen": Seen()}), CPU)
    assert task is not None
    task.sums(batch["x"], batch)
    task.update(counted=True)
    assert [text for text, _ in got] == ["2", "1"]
    assert [each["boxes"].tolist() for _, each in got] == [[1, 0, 0], [0, 0, 1]]
    assert not any(each["boxes"].requires_grad for _, each in got)
    wrong = measuring(Texts("x", "y", scale=2, metrics={"seen": Seen()}), CPU)
    assert wrong is not None
    with pytest.raises(ConfigError, match=r"`measured` returned a tuple of a dict of boxes"):
        wrong.sums(batch["x"], batch)


SLOW = {"one": Degrees(1), "two": Degrees(2), "two of tensor parallel": Degrees(2, tp=2)}


@pytest.mark.parametrize(
    ("degrees", "rows"),
    [
        pytest.param(
            Degrees(3), [row for row in range(ROWS) if row % 3 < 2], id="one without samples"
        ),
        *(
            pytest.param(degrees, [*range(ROWS)], id=name, marks=pytest.mark.slow)
            for name, degrees in SLOW.items()
        ),
    ],
)
def test_metrics_are_those_of_one_process(degrees: Degrees, rows: list[int]) -> None:
    for found in run_ranks(all_kinds, degrees.ranks, degrees, timeout=480):
        for kind, mine in zip(KINDS, found, strict=True):
            assert mine == pytest.approx(expected(kind, rows), rel=1e-5)


def unequal(_: int) -> str:
    return refused({"kept": kept()}, 1 + distributed.get_rank())


def test_lists_that_ranks_do_not_have_alike_are_refused() -> None:
    for said in run_ranks(unequal, 2, 0):
        assert said.startswith("task.metrics.kept: the ranks have [1, 2] tensors in its state")


def refused(metrics: dict[str, Any], rows: int = ROWS) -> str:
    task, whole = made("classes")
    task.metrics = metrics
    batch = whole | {"mask": torch.ones(ROWS, dtype=torch.bool)}
    batch = {name: value[:rows] for name, value in batch.items()}
    mesh = Mesh(Degrees(distributed.get_world_size()), distributed.get_rank(), CPU)
    model = ParallelModel(Same(), setup_of(Same, mesh))
    try:
        measured = MeasuredTask(task, mesh)
        model.evaluate(measured.task, batch)
        measured.update()
        measured.values()
    except ConfigError as error:
        return str(error)
    return "nothing"


@pytest.mark.usefixtures("group_of_one")
def test_metrics_that_do_not_fit() -> None:
    from tests.tasks.light import torchmetrics

    given: dict[str, Any] = {"task": "multiclass", "num_classes": CLASSES}
    both = torchmetrics.MetricCollection([torchmetrics.F1Score(**given)])
    none = refused({"auroc": 3})
    assert refused({"all": both}) == (
        "task.metrics.all is a dict of MulticlassF1Score; a metric is one number: choose an "
        "average (average: macro), or give each part its own metric"
    )
    assert refused({"kept": kept("text")}).startswith(
        "task.metrics.kept keeps an object of builtins.str in its state 'rows': ranks can "
    )
    several = refused({"f1": torchmetrics.F1Score(**given, average=None)})
    other = refused({"f1": torchmetrics.F1Score(task="binary")})
    assert none.startswith("task.metrics.auroc is 3; it must be a metric of torchmetrics")
    assert several.startswith("task.metrics.f1 is a tensor of shape (4,); a metric is one number")
    assert other.startswith(
        "task.metrics.f1=BinaryF1Score got float32 (23, 4), int64 (23,), and refuses it: "
    )
