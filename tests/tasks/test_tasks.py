"""Classification, multi-label and regression: their sums are those of torch and scikit-learn."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hpctrain.config.rules.metrics import names as metric_names
from hpctrain.config.schema import Config
from hpctrain.errors import ConfigError
from hpctrain.tasks import (
    Classification,
    LanguageModel,
    MultiLabel,
    Regression,
    checked,
    derived,
    on_device,
)
from hpctrain.tasks.labels import Labels
from tests.bounds import EXACT

MASK = torch.tensor([True, True, True, True, False, True])


def means(task: Any, outputs: Any, **fields: torch.Tensor) -> dict[str, float]:
    """Return the means of a batch of six samples, of which the fifth does not count."""
    model = nn.Module()
    model.forward = lambda *_: outputs
    sums = checked(task(model, fields | {"mask": MASK}))
    return derived(task, {name: float(total / count) for name, (total, count) in sums.items()})


def test_class_weights_and_smoothing_are_those_of_torch() -> None:
    torch.set_default_dtype(torch.float64)
    logits, labels = torch.randn(6, 4), torch.tensor([0, 1, 2, 3, 3, 1])
    weights = [0.5, 2.0, 0.0, 1.0]
    task = Classification(class_weights=weights, label_smoothing=0.1, top_k=[1, 3])
    found = means(task, logits, image=torch.zeros(6, 1), label=labels)
    expected = F.cross_entropy(
        logits[MASK], labels[MASK], torch.tensor(weights), label_smoothing=0.1
    )
    assert found["loss"] == pytest.approx(expected.item(), rel=EXACT)
    assert found["top1_accuracy"] == found["accuracy"]
    best = (logits.topk(3).indices == labels[:, None]).any(1)
    assert found["top3_accuracy"] == pytest.approx(best[MASK].double().mean().item())
    # Probabilities as targets, as mixup makes them.
    soft = torch.rand(6, 4).softmax(1)
    found = means(task, logits, image=torch.zeros(6, 1), label=soft)
    expected = F.cross_entropy(logits[MASK], soft[MASK], torch.tensor(weights), label_smoothing=0.1)
    assert found["loss"] == pytest.approx(expected.item(), rel=EXACT)


def test_pixels_that_are_ignored_do_not_count() -> None:
    torch.set_default_dtype(torch.float64)
    logits, labels = torch.randn(6, 3, 4, 5), torch.randint(0, 3, (6, 4, 5))
    labels[:, 0] = 255
    found = means(Classification(ignore=255), logits, image=torch.zeros(6, 1), label=labels)
    expected = F.cross_entropy(logits[MASK], labels[MASK], ignore_index=255)
    assert found["loss"] == pytest.approx(expected.item(), rel=EXACT)
    right = (logits.argmax(1) == labels)[MASK][labels[MASK] != 255]
    assert found["accuracy"] == pytest.approx(right.double().mean().item())


def test_labels_and_their_micro_averages() -> None:
    from sklearn.metrics import precision_recall_fscore_support

    torch.set_default_dtype(torch.float64)
    logits, labels = torch.randn(6, 5), torch.rand(6, 5) < 0.4
    weights = [1.0, 2.0, 3.0, 4.0, 5.0]
    task = MultiLabel(positive_weights=weights, threshold=0.4)
    found = means(task, logits, image=torch.zeros(6, 1), label=labels)
    expected = F.binary_cross_entropy_with_logits(
        logits[MASK], labels[MASK].double(), pos_weight=torch.tensor(weights)
    )
    assert found["loss"] == pytest.approx(expected.item(), rel=EXACT)
    predicted = (logits.sigmoid() > 0.4)[MASK]
    three = precision_recall_fscore_support(labels[MASK], predicted, average="micro")[:3]
    assert [found["precision"], found["recall"], found["f1"]] == pytest.approx([*three])
    one = means(MultiLabel(), logits[:, :1], image=torch.zeros(6, 1), label=labels[:, 0])
    assert one["accuracy"] == pytest.approx(
        ((logits[:, 0] > 0) == labels[:, 0])[MASK].double().mean().item()
    )


@pytest.mark.parametrize("loss", ["mse", "l1", "relative_l2"])
def test_regression_on_fields_with_weights_by_name(loss: str) -> None:
    torch.set_default_dtype(torch.float64)
    found, target = torch.randn(6, 2, 3, 4), torch.randn(6, 2, 3, 4)
    task = Regression("x", "y", loss, channels=["u", "p"], weights={"p": 3.0})
    got = means(task, found, x=torch.zeros(6, 1), y=target)
    error, right = (found - target)[MASK], target[MASK]
    weights = torch.tensor([1.0, 3.0]).view(2, 1, 1)
    expected = {
        "mse": (error.square() * weights / 2).mean(),
        "l1": (error.abs() * weights / 2).mean(),
        "relative_l2": (
            (error.square() * weights).flatten(1).sum(1)
            / (right.square() * weights).flatten(1).sum(1)
        )
        .sqrt()
        .mean(),
    }
    assert got["loss"] == pytest.approx(expected[loss].item(), rel=EXACT)
    assert got["mse"] == pytest.approx(error.square().mean().item(), rel=EXACT)
    assert got["mse/p"] == pytest.approx(error[:, 1].square().mean().item(), rel=EXACT)
    assert got["rmse"] ** 2 == pytest.approx(got["mse"])
    norms = error.flatten(1).norm(dim=1) / right.flatten(1).norm(dim=1)
    assert got["relative_l2"] == pytest.approx(norms.mean().item(), rel=EXACT)


def test_regression_on_a_table_of_columns() -> None:
    task = Regression(["age", "height"], "weight", scale=0.5)
    batch = {"age": torch.arange(6), "height": torch.ones(6), "weight": torch.arange(6.0)}
    (inputs,) = task.inputs(batch | {"mask": MASK})
    assert inputs.tolist() == [[i / 2, 0.5] for i in range(6)]
    found = means(task, torch.arange(6.0)[:, None] + 2, **batch)
    assert (found["mse"], found["mae"]) == (4.0, 2.0)
    exact = torch.arange(6.0).requires_grad_()
    Regression("age", "weight", "relative_l2").sums(exact, batch | {"mask": MASK})["loss"][
        0
    ].backward()
    assert exact.grad is not None
    assert exact.grad.isfinite().all()


X = {"x": torch.zeros(6, 3), "y": torch.zeros(6, 2), "label": torch.zeros(6, 2), "z": torch.ones(6)}


@pytest.mark.parametrize(
    ("task", "outputs", "said"),
    [
        (Regression(), (torch.zeros(6, 2), None), r"a tuple of float32 \(6, 2\), None; the task"),
        (Regression(), {"y": torch.zeros(6, 2)}, r"a dict of y: float32 \(6, 2\); the task needs"),
        (Regression(), SimpleNamespace(x=1), r"an object of types\.SimpleNamespace"),
        (Regression(), torch.zeros(6, 3), r"task\.target=y, which is float32 \(6, 2\)"),
        (Regression("a"), torch.zeros(6), r"task\.input=a: the data set's fields are x, y"),
        (Regression(["x", "z"]), torch.zeros(6), r"have one shape; here x \(6, 3\), z \(6,\)"),
        (Regression(channels=["a"]), torch.zeros(6, 2), r"with 2 channels along its second axis"),
        (Classification("x", "y"), torch.zeros(6, 3), r"targets are integers"),
        (Classification("x", "label", class_weights=[1]), torch.zeros(6, 2), r"with 2 classes"),
        (MultiLabel("x"), torch.zeros(6, 3), r"a logit for each label is needed"),
    ],
)
def test_what_the_task_cannot_read(task: Any, outputs: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        means(task, outputs, **X)


OF_SAMPLES = torch.tensor([0, 1, 2, -100, 1, 3])
OF_PIXELS = OF_SAMPLES[:, None, None].expand(6, 2, 2)
OUTSIDE = [
    (
        Classification(),
        torch.zeros(6, 3),
        OF_SAMPLES,
        "row 3 of 6 is -100, and 1 more are outside, but the model returned 3 classes: labels are "
        "0 to 2. task.ignore=-100 leaves such labels out",
    ),
    (
        Classification(ignore=-100),
        torch.zeros(6, 3, 2, 2),
        OF_PIXELS,
        "row 5 of 6, position 0, 0 is 3, and 3 more are outside, but the model returned 3 classes: "
        "labels are 0 to 2. Are they counted from 1?",
    ),
    (
        Classification(),
        torch.zeros(6, 3),
        torch.eye(3).repeat(2, 1) * 2,
        "row 0 of 6, position 0 is 2, and 5 more are outside, but they are probabilities: labels "
        "are 0 to 1. task.ignore=2 leaves such labels out",
    ),
    *(
        (
            MultiLabel(),
            torch.zeros(6, 2),
            labels,
            "row 5 of 6, position 1 is 255, but each is there or not: labels are 0 to 1. "
            "task.ignore=255 leaves such labels out",
        )
        for labels in (
            torch.tensor([[0, 1]] * 5 + [[1, 255]], dtype=d) for d in (torch.uint8, torch.float32)
        )
    ),
    (
        LanguageModel("label"),
        torch.zeros(6, 2, 5),
        torch.tensor([[9, 1, 4]] * 5 + [[9, 1, 5]]),
        "row 5 of 6, position 1 is 5, but the model returned logits of 5 tokens: labels are 0 to 4."
        " Are they counted from 1?",
    ),
]


@pytest.mark.parametrize(("task", "outputs", "labels", "said"), OUTSIDE)
def test_a_label_outside_its_range_is_named(
    task: Any, outputs: torch.Tensor, labels: torch.Tensor, said: str
) -> None:
    batch = {"image": torch.zeros(6, 1), "label": labels, "mask": MASK}
    with pytest.raises(ConfigError) as caught:
        task.sums(outputs, batch)
    name = "tokens" if isinstance(task, LanguageModel) else "target"
    assert str(caught.value) == f"task.{name}=label: {said}"


@pytest.mark.parametrize(("task", "outputs", "labels", "said"), OUTSIDE)
def test_where_the_host_does_not_wait_the_loss_is_not_finite(
    task: Any,
    outputs: torch.Tensor,
    labels: torch.Tensor,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As in a later batch on a GPU, which the tests do not have."""
    monkeypatch.setattr(Labels, "_looks", lambda *_: False)
    batch = {"image": torch.zeros(6, 1), "label": labels, "mask": MASK}
    assert not task.sums(outputs, batch)["loss"][0].isfinite()
    with torch.device("meta"):
        task.sums(outputs.to("meta"), {name: value.to("meta") for name, value in batch.items()})


def test_labels_that_nobody_knows_do_not_count() -> None:
    torch.set_default_dtype(torch.float64)
    logits, labels = torch.randn(6, 5), torch.randint(0, 2, (6, 5))
    labels[:4, 1] = -1
    found = means(MultiLabel(ignore=-1), logits, image=torch.zeros(6, 1), label=labels)
    known = MASK[:, None] & (labels != -1)
    expected = F.binary_cross_entropy_with_logits(logits[known], labels[known].double())
    assert found["loss"] == pytest.approx(expected.item(), rel=EXACT)
    right = ((logits > 0) == labels)[known]
    assert found["accuracy"] == pytest.approx(right.double().mean().item())


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Regression(loss="l3"), "loss=l3: it is mse, l1, relative_l2"),
        (lambda: Regression(channels=["u"], weights={"v": 1}), r"without v; name them"),
        (lambda: Regression(target=["u"], channels=["v"]), r"the targets \['u'\] are their names"),
        (lambda: Classification(label_smoothing=1), "label_smoothing=1"),
        (lambda: Classification(top_k=[0]), r"top_k=\[0\]"),
        (lambda: Classification(class_weights=[0, 0]), r"class_weights=\[0, 0\]"),
        (lambda: MultiLabel(threshold=1), "threshold=1"),
    ],
)
def test_arguments_that_are_refused(make: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        make()


@pytest.mark.parametrize(
    ("sums", "said"),
    [
        (torch.zeros(()), r"the task returned float32 \(\): a task returns \{\"loss\""),
        ({"mse": (1, 1)}, "returned mse, but no loss"),
        ({"loss": torch.zeros(2)}, r"the task's loss is float32 \(2,\)"),
        ({"loss": (torch.zeros(4), torch.ones(()))}, r"the sum of the task's loss is float32 \(4,"),
        ({"loss": (torch.zeros(()), 64)}, r"the count of the task's loss is 64.*\[\"mask\"\]\.sum"),
    ],
)
def test_a_task_that_returns_something_else(sums: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        checked(sums)


def test_the_names_of_the_metrics_are_known_from_the_config() -> None:
    tasks: list[tuple[type, dict[str, Any], Any]] = [
        (Classification, {"input": "x", "target": "i", "top_k": [2]}, torch.zeros(6, 2)),
        (MultiLabel, {"input": "x"}, torch.zeros(6, 2)),
        (Regression, {}, torch.zeros(6, 2)),
        (Regression, {"target": ["z"]}, torch.zeros(6, 1)),
        (Regression, {"channels": ["u", "v"]}, torch.zeros(6, 2)),
    ]
    for kind, arguments, outputs in tasks:
        found = means(kind(**arguments), outputs, **X, i=torch.zeros(6).long())
        measured = {"metrics": {"auroc": {"_target_": "torchmetrics.AUROC"}}}
        section = {"_target_": f"{kind.__module__}.{kind.__name__}", **arguments, **measured}
        known = metric_names(Config(task=section)) or ()
        val = [name for name in known if name.startswith("val/")]
        assert val == [f"val/{name}" for name in [*found, "auroc"]]


@pytest.mark.parametrize("ignore", ["nan", -999])
@pytest.mark.parametrize("loss", ["mse", "l1", "relative_l2"])
def test_regression_leaves_out_targets_that_do_not_exist(loss: str, ignore: float | str) -> None:
    torch.set_default_dtype(torch.float64)
    found, target = torch.randn(6, 2, 3, requires_grad=True), torch.randn(6, 2, 3)
    exists = torch.rand(6, 2, 3) < 0.6
    exists[1], exists[0, 0, 0] = False, True  # a sample without any
    task = Regression("x", "y", loss, channels=["u", "p"], weights={"p": 3.0}, ignore=ignore)
    batch = {"x": torch.zeros(6, 1), "y": torch.where(exists, target, float(ignore)), "mask": MASK}
    sums = task.sums(found, batch)
    total, count = sums["loss"]
    (gradient,) = torch.autograd.grad(total / count, found)
    counted = exists & MASK.view(6, 1, 1)
    assert (gradient[~counted] == 0).all()
    assert (gradient[counted] != 0).all()
    rows = [i for i in range(6) if counted[i].any()]
    weights = torch.tensor([[0.5], [1.5]]).expand(2, 3)
    error = (found - target).detach()
    known = {name: value[counted] for name, value in (("e", error), ("w", weights.expand(6, 2, 3)))}

    def norms(weights: torch.Tensor) -> torch.Tensor:
        squares = [
            [((each[i] ** 2 * weights)[exists[i]]).sum() for i in rows] for each in (error, target)
        ]
        return torch.tensor(squares[0]).div(torch.tensor(squares[1])).sqrt().mean()

    expected = {
        "mse": (known["e"] ** 2 * known["w"]).sum() / known["w"].sum(),
        "l1": (known["e"].abs() * known["w"]).sum() / known["w"].sum(),
        "relative_l2": norms(weights),
    }
    assert (total / count).item() == pytest.approx(expected[loss].item(), rel=EXACT)
    got = {name: float(value.detach() / number) for name, (value, number) in sums.items()}
    assert got["mse"] == pytest.approx((known["e"] ** 2).mean().item(), rel=EXACT)
    assert got["mae"] == pytest.approx(known["e"].abs().mean().item(), rel=EXACT)
    assert got["relative_l2"] == pytest.approx(norms(torch.ones(2, 3)).item(), rel=EXACT)
    own = error[:, 1][counted[:, 1]]
    assert got["mse/p"] == pytest.approx((own**2).mean().item(), rel=EXACT)


class Distilled(Classification):
    """A task with a teacher, centres and a list of modules."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher, self.others = nn.Linear(2, 2), [nn.Linear(2, 2)]
        self.centres, self.scale = torch.ones(2), nn.Parameter(torch.ones(()))


class Scored(nn.Module):
    """A task that is a module itself."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher, self.centres = nn.Linear(2, 2), torch.ones(2)


def test_modules_and_tensors_of_a_task_go_to_the_device() -> None:
    meta = torch.device("meta")
    task: Any = on_device(Distilled(), meta)
    module: Any = on_device(Scored(), meta)
    held = [task.teacher.weight, task.others[0].weight, task.centres, task.scale]
    assert {each.device for each in [*held, module.teacher.weight, module.centres]} == {meta}
    assert isinstance(task.scale, nn.Parameter)
    assert on_device(task_of_a_function, meta) is task_of_a_function


def task_of_a_function(model: Any, batch: Any) -> Any:
    """Stands for a task without attributes."""
