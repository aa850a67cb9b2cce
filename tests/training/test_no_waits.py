"""A training step never lets the host wait for the device, shown on the meta device.

The meta device stands for a GPU: `engine.parallel.reducing.scalars` treats it
as one. Its tensors have no values, so torch refuses every operation that reads one, as
`item`, `tolist`, `bool` and `nonzero` do. `Waits` also refuses the copies that wait. tests/gpu
shows the same on a GPU, where torch tells by itself (`torch.cuda.set_sync_debug_mode`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hpctrain.config.rules.degrees import Degrees
from hpctrain.config.schema import PrecisionConfig
from hpctrain.data.shards.types import Batch
from hpctrain.engine.faults import health
from hpctrain.engine.faults.stop import Stop
from hpctrain.engine.parallel.mesh import Mesh
from hpctrain.engine.parallel.precision import Precision
from hpctrain.engine.parallel.reducing import scalars
from hpctrain.engine.parallel.wrappers import parallel_model
from hpctrain.engine.parallel.wrappers.parallel_model import ParallelModel
from hpctrain.engine.steps.logged import Logged
from hpctrain.engine.supervised.evaluations import evaluate_all
from hpctrain.engine.supervised.step import Totals, TrainStep
from hpctrain.models import MLP, Transformer
from hpctrain.tasks import Classification, LanguageModel, Task
from hpctrain.tasks.labels import Labels
from tests.gpu.bench_digits import by_hand as digits_by_hand
from tests.gpu.bench_gpt2 import by_hand as gpt2_by_hand
from tests.steps import Watched, setup_of, step_of, stop_of, weights

pytestmark = pytest.mark.usefixtures("group_of_one", "pinned")
META, CPU = torch.device("meta"), torch.device("cpu")


class Waits(TorchDispatchMode):
    """Refuses what would let the host wait for a GPU.

    Args:
        pinned: The ids of the tensors that are in page-locked memory.
    """

    def __init__(self, pinned: dict[int, torch.Tensor]) -> None:
        super().__init__()
        self.pinned, self.copies = pinned, 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        out = func(*args, **(kwargs or {}))
        made = [x for x in tree_leaves(out) if isinstance(x, torch.Tensor)]
        if "copy" in str(func) and {x.device for x in (*given, *made)} == {CPU, META}:
            source = given[-1]
            assert source.device == CPU, "a tensor is copied from the device"
            behind = any(value is True for value in (*args, *(kwargs or {}).values()))
            assert behind, "a tensor is copied, and not with non_blocking"
            assert id(source) in self.pinned, "a tensor is copied, and not from pinned memory"
            self.copies += 1
        return out


class Lists(TorchFunctionMode):
    """Refuses to make a tensor of the device from numbers, which `Waits` does not see."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in (torch.tensor, torch.as_tensor, torch.Tensor.new_tensor):
            kept = out.device == CPU or any(value is out for value in args)
            assert kept, "numbers are copied to the device"
        return out


@contextmanager
def no_waits(pinned: dict[int, torch.Tensor]) -> Iterator[Waits]:
    """Refuse what would let the host wait for a GPU."""
    with Lists(), Waits(pinned) as waits:
        yield waits


@pytest.fixture
def pinned(monkeypatch: pytest.MonkeyPatch) -> dict[int, torch.Tensor]:
    """Stand for what needs CUDA: pinned memory, and the copy from a GPU into it."""
    known: dict[int, torch.Tensor] = {}

    def pin_memory(tensor: torch.Tensor) -> torch.Tensor:
        assert tensor.device == CPU
        copy = tensor.clone()
        known[id(copy)] = copy
        return copy

    def to_host(values: torch.Tensor, memory: Any) -> Any:
        assert values.device == META
        return SimpleNamespace(
            numbers=torch.zeros(values.shape), arrived=SimpleNamespace(synchronize=lambda: None)
        )

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin_memory)

    class Counted(scalars.Copied):
        """Numbers of the steps with a count, in place of the zero of `to_host`."""

        def take(self, *, late: bool) -> Iterator[tuple[list[float], Any]]:
            for numbers, about in super().take(late=late):
                yield [*numbers[:3], 1.0], about

    monkeypatch.setattr(scalars, "to_host", to_host)
    monkeypatch.setattr(health, "Copied", Counted)
    # The meta device has no autocast; it changes dtypes, and reads nothing.
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: nullcontext())
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda _: False)
    return known


def language(device: torch.device, **options: Any) -> tuple[nn.Module, Task, Batch]:
    documents = options.pop("documents", False)
    batch = {
        "tokens": torch.zeros(8, 17, dtype=torch.int64, device=device),
        "tokens_document": torch.zeros(8, 17, dtype=torch.int32, device=device),
        "mask": torch.ones(8, dtype=torch.bool, device=device),
    }
    model = Transformer(64, 32, 2, 4, 2, **options)
    return model, LanguageModel(documents=documents, chunk=32), batch


def images(device: torch.device) -> tuple[nn.Module, Task, Batch]:
    batch = {
        "image": torch.zeros(8, 1, 8, 8, dtype=torch.uint8, device=device),
        "label": torch.zeros(8, dtype=torch.int64, device=device),
        "mask": torch.ones(8, dtype=torch.bool, device=device),
    }
    inner = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), MLP(144, [], 10))
    return inner, Classification(), batch


MODELS: dict[str, Callable[[torch.device], tuple[nn.Module, Task, Batch]]] = {
    "transformer": language,
    "documents, dropout": functools.partial(language, documents=True, dropout=0.1),
    "experts": functools.partial(language, experts=4, shared_experts=1),
    "images": images,
}


def make(model: str, accumulate: int, device: torch.device) -> tuple[TrainStep, Batch]:
    """Return a training step of one of MODELS, and a batch; tests/gpu has them on a GPU."""
    module, task, batch = MODELS[model](device)
    # Grouped products of experts need bf16.
    module = module.to(device, torch.bfloat16 if model.startswith("experts") else None)
    spread = ParallelModel(module, setup_of(module, Mesh(Degrees(), 0, device), accumulate))
    kind = torch.optim.AdamW if model in ("transformer", "images") else torch.optim.SGD
    optimizer = kind(spread.parameters, lr=0.1)
    return step_of(spread, task, optimizer, clip_norm=1.0), batch


@pytest.mark.parametrize(
    ("model", "accumulate"), [*((model, 1) for model in MODELS), ("transformer", 4)]
)
def test_a_step_does_not_wait(model: str, accumulate: int, pinned: dict[int, torch.Tensor]) -> None:
    step, batch = make(model, accumulate, META)
    with no_waits(pinned) as waits:
        for number in range(3):
            step.health.begin(number + 1, 0, list)
            step(batch, 0.1)
            step.health.judge(late=True)
            assert not stop_of(step).agreed
    assert waits.copies == 1, "the flags of the stop request, which are told once"
    with pytest.raises(Exception, match=r"meta"):  # what waits is refused
        step.totals.means()


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let tensors of the CPU take the road of a GPU's; return the sizes of the copies to the host.

    Only the copies themselves, and page-locked memory, are stood for.
    """
    sent: list[int] = []

    def to_host(values: torch.Tensor, memory: Any) -> Any:
        sent.append(len(values))
        numbers = torch.empty(64, dtype=torch.float64) if memory is None else memory.numbers
        numbers.numpy()[: len(values)] = values.numpy()  # which is no operation of torch
        return scalars._Memory(numbers, SimpleNamespace(synchronize=lambda: None))  # type: ignore[arg-type]

    for module in (scalars, health, parallel_model):
        monkeypatch.setattr(module, "is_late", lambda x: isinstance(x, torch.Tensor))
    monkeypatch.setattr(scalars, "on_device", lambda x, _: torch.tensor(x, dtype=torch.float64))
    monkeypatch.setattr(scalars, "to_host", to_host)
    monkeypatch.setattr(Labels, "_looks", lambda *_: False)
    return sent


def kernels(call: Callable[[], object]) -> int:
    """Return the operations of torch that are more than another view."""
    found = []
    with Watched(lambda func, _: found.append(func)):
        call()
    no_kernel = ("detach", "_unsafe_view", "empty", "record_function", "profiler")
    return sum(not (f.is_view or any(each in str(f) for each in no_kernel)) for f in found)


def results(model: str, accumulate: int) -> tuple[Any, ...]:
    """Return the losses, norms and last parameters of ten steps."""
    torch.manual_seed(0)
    step, batch = make(model, accumulate, CPU)
    norms = []
    for number in range(10):
        step.health.begin(number + 1, 0, list)
        step(batch, 0.01)
        step.health.judge(late=True)
        norms.append(float(step.grad_norm))
    return step.totals.means(), norms, torch.cat([p.flatten() for p in step.model.parameters])


@pytest.mark.parametrize(
    ("model", "accumulate"), [("images", 1), ("transformer", 4), ("documents, dropout", 1)]
)
def test_the_road_of_a_gpu_gives_the_bits_of_the_cpu(
    model: str, accumulate: int, request: pytest.FixtureRequest
) -> None:
    means, norms, parameters = results(model, accumulate)
    sent = request.getfixturevalue("late")
    late_means, late_norms, late_parameters = results(model, accumulate)
    assert (late_means, late_norms) == (means, norms)
    assert torch.equal(late_parameters, parameters)
    assert len(sent) == 10, "one copy in each step"


@pytest.mark.parametrize("road", ["cpu", "gpu"])
def test_where_nothing_counts_the_scale_of_fp16_stays(
    road: str, request: pytest.FixtureRequest
) -> None:
    if road == "gpu":
        request.getfixturevalue("late")
    step, batch = make("images", 1, CPU)
    step.model.precision = Precision(PrecisionConfig("fp16"), CPU)
    before, kept = weights(step), step.model.precision.state_dict()
    step(batch | {"mask": torch.zeros_like(batch["mask"])}, 0.1)
    assert step.model.precision.state_dict() == kept
    assert step.health.problem == "count"
    assert torch.equal(weights(step), before)


def test_what_a_failed_step_has_offered_is_not_sent_by_the_next_training(late: list[int]) -> None:
    step, batch = make("images", 1, CPU)
    step(batch, 0.1)
    step.model.scale_gradients = None  # type: ignore[method-assign,assignment]
    with pytest.raises(TypeError, match="not callable"):
        step(batch, 0.1)
    again, batch = make("images", 1, CPU)
    again(batch, 0.1)
    assert late[0] == late[1]


@pytest.mark.parametrize(("model", "most"), [("images", 22), ("transformer", 16)])
def test_a_step_has_few_kernels_more_than_a_loop_by_hand(
    model: str, most: int, late: list[int]
) -> None:
    step, batch = make(model, 1, CPU)
    step.task = Classification() if model == "images" else LanguageModel()
    loop = digits_by_hand if model == "images" else gpt2_by_hand
    by_hand = loop(step.model, step.optimizer, batch)
    found = []
    for call in (lambda: step(batch, 0.1), by_hand):
        call()  # makes the state of the optimizer
        found.append(kernels(call))
    assert 0 < found[0] - found[1] <= most


def test_a_loop_of_ones_own_does_not_wait_where_it_logs(pinned: dict[int, torch.Tensor]) -> None:
    mesh, judge = Mesh(Degrees(), 0, META), health.Health()
    logged, stop = Logged(mesh, judge), Stop()
    exchange = scalars.Exchange(mesh, [stop, logged])
    with no_waits(pinned) as waits:
        for number in range(3):
            judge.begin(number + 1, 0, list)
            loss = torch.ones((), device=META)
            logged.add({"train/a": 0.5, "train/b": (loss, 8), "train/c": loss})
            total, _ = exchange.reduce(own := logged.own())
            logged.judge(own, total)
            judge.judge(late=True)
            assert not stop.agreed
            assert not logged.wants_report()
    assert waits.copies == 1, "the flags, which are told once"


def test_an_evaluation_waits_only_for_its_means(
    pinned: dict[int, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    step, batch = make("transformer", 1, META)

    class Batches(list[Batch]):
        def load_state_dict(self, state: dict[str, int]) -> None:
            pass

    feed: Any = Batches([batch] * 3)
    monkeypatch.setattr(Totals, "means", lambda totals: {})
    with no_waits(pinned) as waits:
        assert evaluate_all(step, {"val": feed}, stop_of(step)) == {}
    assert waits.copies == 3
