"""What is said of losses that are finite, and what is not said of those that are healthy."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable

import pytest
import torch

from hpctrain.addons.watch import Watch
from hpctrain.base.names.run_record import Note
from hpctrain.engine.parallel.wrappers.parallel_model import ParallelModel
from hpctrain.engine.part import Part
from hpctrain.engine.parts.notes import Notes
from hpctrain.errors import HealthError
from tests.parallel.parity import Cell, build

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
            watch.reported(step)
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
            watch.reported(step)
        if step == resumed_at:
            state = json.loads(json.dumps(watch.state_dict(), allow_nan=False))
            watch = Watch(notes, "stop", max_steps=400)
            watch.load_state_dict(state)
    with pytest.raises(HealthError, match=r"diverged: it is 40 at step 300"):
        watch.reported(300)


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
            watch.reported(step)
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
        watch.reported(30)


class Looks(Part):
    """What a user writes to see gradients: a layer without one is named."""

    def __init__(self, model: ParallelModel) -> None:
        self.model, self.without = model, set[str]()

    def after_backward(self) -> None:
        pairs = zip(self.model.names, self.model.parameters, strict=True)
        self.without |= {name for name, p in pairs if p.grad is None or not p.grad.any()}


@pytest.mark.usefixtures("group_of_one")
def test_a_part_sees_the_gradients_of_a_step() -> None:
    training = build(one := Cell("conv", 1))
    looks = Looks(training.step.model)
    training.step.use([looks])
    training.run(one, 1)
    assert looks.without == set()
    with torch.no_grad():
        training.step.model.parameters[-2].zero_()  # the head: nothing below it gets a gradient
    training.run(one, 1)
    assert looks.model.names[0] in looks.without
