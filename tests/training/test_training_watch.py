"""What is said of losses that are finite, and what is not said of those that are healthy."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from hpctrain.base.names.run_record import Note
from hpctrain.engine.parts.notes import Notes
from hpctrain.engine.parts.watch import SilentLayers, Watch
from hpctrain.errors import HealthError
from tests.parallel.parity import Cell, batch, build
from tests.ranks import run_ranks
from tests.steps import stack_of_one_device

Loss = Callable[[int], float]
noise = random.gauss  # seeded before each test
FIRST = math.log(10)


def healthy(step: int) -> float:
    """Late batches differ a hundredfold, as those of a classifier do that is nearly right."""
    return FIRST * math.exp(-step / 80 + noise(0, 0.3)) + 0.003 * math.exp(noise(0, 1.2))


def watched(loss: Loss, steps: int) -> list[str]:
    """Return the topics of the notes that there ever were, in a run that is resumed once."""
    ever: list[str] = []
    notes = Notes(record=lambda notes: ever.extend(note.topic for note in notes))
    watch = Watch(notes, "note", max_steps=steps)
    for step in range(1, steps + 1):
        notes.step = step
        watch.seen(step, loss(step))
        if step % 20 == 0 or step == steps:
            watch.judge(step, None, 0)
        if step == steps // 2:
            state = json.loads(json.dumps(watch.state_dict(), allow_nan=False))
            watch = Watch(notes, "note", max_steps=steps)
            watch.load_state_dict(state)
    return sorted({*ever})


LOSSES: dict[str, tuple[Loss, int, list[str]]] = {
    "20 steps": (lambda n: FIRST + noise(0, 0.1), 20, []),
    "a classifier": (healthy, 330, []),
    "a language model": (lambda n: 3 + 7.8 * n**-0.4 + noise(0, 0.06), 2000, []),
    "a spike that came back": (lambda n: 50.0 if n == 280 else healthy(n), 330, []),
    "it is 0": (lambda n: 5.0 * 0.5**n, 300, []),
    "lr=1e5": (lambda n: FIRST if n < 2 else 8.6e7 * math.exp(-n / 50), 150, ["diverged"]),
    "a blow-up": (lambda n: healthy(n) if n < 280 else 40.0, 400, ["diverged"]),
}


@pytest.mark.parametrize("kind", LOSSES)
def test_what_is_said_of_a_loss(kind: str) -> None:
    loss, steps, topics = LOSSES[kind]
    assert watched(loss, steps) == topics


@pytest.mark.parametrize("resumed_at", [0, 281, 295, 299])
def test_a_kill_does_not_change_where_a_watched_run_ends(resumed_at: int) -> None:
    watch = Watch(notes := Notes(), "stop", max_steps=400)
    for step in range(1, 301):
        notes.step = step
        watch.seen(step, 2 * math.exp(-step / 80) if step < 280 else 40.0)
        if step % 20 == 0 and step < 300:
            watch.judge(step, None, 0)
        if step == resumed_at:
            state = json.loads(json.dumps(watch.state_dict(), allow_nan=False))
            watch = Watch(notes, "stop", max_steps=400)
            watch.load_state_dict(state)
    with pytest.raises(HealthError, match=r"diverged: it is 40 at step 300"):
        watch.judge(300, None, 0)


def test_a_divergence_is_taken_back_only_when_the_loss_is_low_again_and_not_in_silence(
    caplog: pytest.LogCaptureFixture,
) -> None:
    kept: list[list[Note]] = []
    notes = Notes(record=lambda now: kept.append([*now]))
    watch = Watch(notes, "note", max_steps=400)
    # From step 60 on, each fifth batch has no error, as with a hinge loss; from step 100 on all is
    # well again.
    for step in range(1, 141):
        notes.step = step
        loss = 1.0 if step < 20 or step > 100 else 0.0 if step > 60 and step % 5 == 0 else 1e29
        watch.seen(step, loss)
        if step % 20 == 0:
            watch.judge(step, None, 0)
        if step in (60, 100):
            assert [note.topic for note in kept[-1] if note.topic == "diverged"] == ["diverged"]
            assert "taken back" not in caplog.text
    assert "diverged" not in [note.topic for note in kept[-1]]
    assert (
        "taken back at step 120, no longer so: train/loss has diverged: it is 1e+29" in caplog.text
    )


def test_a_run_is_stopped_only_if_asked() -> None:
    notes = Notes(record=lambda _: None)
    watch = Watch(notes, "stop", max_steps=100)
    for step in range(1, 31):
        watch.seen(step, 1.0 if step == 1 else 1e4)
    with pytest.raises(HealthError, match=r"has diverged.*because of train\.watch=stop"):
        watch.judge(30, None, 0)


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "single": (1, {}),
    "zero3": (2, {"parallel.dp_shard": 2, "parallel.zero": 3}),
    "tp": (2, {"parallel.tp": 2}),
    "pp": (2, {"parallel.pp": 2, "train.accumulate": 2}),
}


def silent(layout: str) -> tuple[list[str], int]:
    """Return the layers without a gradient, where the second block adds nothing to its input."""
    ranks, keys = LAYOUTS[layout]
    training = build(Cell("untied", ranks, tuple(keys.items())))
    step = training.step
    looks = SilentLayers(step.model, 5)
    looks._every = 1
    step.use([looks])
    for number in range(4):
        with torch.no_grad():
            for name, parameter in zip(step.model.names, step.model.parameters, strict=True):
                if name in ("layers.1.attention.out.weight", "layers.1.mlp.down.weight"):
                    parameter.zero_()
        step.model.step = number
        step(training._share(batch("untied", training.seen)), 0.0)
    found = looks.read()
    assert found is not None
    return sorted(found), looks.layers


@pytest.mark.parametrize(
    "layout", [pytest.param(n, marks=() if n == "single" else pytest.mark.slow) for n in LAYOUTS]
)
def test_silent_layers_are_the_same_in_every_layout(layout: str) -> None:
    expected = [
        *(f"layers.1.attention.{name}" for name in ("key", "query", "value")),
        "layers.1.attention_norm",
        *(f"layers.1.mlp.{name}" for name in ("gate", "up")),
        "layers.1.mlp_norm",
    ]
    assert run_ranks(silent, LAYOUTS[layout][0], layout) == [(expected, 39)] * LAYOUTS[layout][0]


def test_gradients_of_the_host_and_of_a_gpu_are_looked_at_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Offload leaves undivided parameters on the GPU, for which a tensor without values stands."""
    monkeypatch.setattr(torch, "stack", stack_of_one_device)
    with FakeTensorMode():
        gradients = torch.ones(3), torch.ones(2, device="cuda"), None
        parameters = [SimpleNamespace(grad=gradient) for gradient in gradients]
        mesh = SimpleNamespace(device=torch.device("cuda"))
        model = cast(Any, SimpleNamespace(step=4, parameters=parameters, mesh=mesh))
        silent = SilentLayers(model, 5)
        silent.after_backward()
    assert silent._most is not None
    assert (silent._most.shape, silent._most.device.type) == ((3,), "cuda")
