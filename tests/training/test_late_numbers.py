"""The numbers of a step are read after the next one is queued, as on a GPU, and decide alike.

There is no GPU here. `Late` stands for one: it holds back the numbers of a step as a GPU does, and
notes when the host has waited for them. Everything else is real: ranks, loader, steps, checkpoints.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed, nn

from hpctrain.data.device_prefetcher import DevicePrefetcher
from hpctrain.data.loading.loader import Loader
from hpctrain.data.shards.types import Batch
from hpctrain.engine.faults.health import Health, RolledBack
from hpctrain.engine.faults.stop import Stop
from hpctrain.engine.parallel.reducing.scalars import Copied, _Copy
from hpctrain.errors import HealthError
from hpctrain.runs.checkpoints.manifest import checkpoints
from hpctrain.tasks import Sums
from tests.data.test_loader import Numbers
from tests.ranks import run_ranks
from tests.steps import Every, alone, step_of, trainer_of

STEPS, ROWS, RANKS = 8, 4, 2
RARELY = Every(log=100, checkpoint=100)
SPOILT = 13  # the sample of step 4 whose loss is NaN: the last row but two, which rank 0 or 1 has


class Late(Copied):
    """Numbers that are on their way, as from a GPU; `events` gets "queued" and "read"."""

    def __init__(self, events: list[str]) -> None:
        super().__init__()
        self.events, self.offers = events, 0

    def offer(self, values: Any, about: Any = None) -> None:
        super().offer(values, about)
        self.offers += 1
        number = self.offers
        self.events.append(f"queued {number}")
        self._offered[-1] = self._offered[-1]._replace(values=OnTheWay(self, number))


class OnTheWay(_Copy):
    """Stands for a copy of numbers that are there already."""

    def __init__(self, late: Late, number: int) -> None:
        self._late, self._number, self._numbers = late, number, late._offered[-1].values

    def read(self) -> Any:
        self._late.events.append(f"read {self._number}")
        return self._numbers


class Squares:
    """A task whose loss is NaN for one sample, and that gets a stop request in one step."""

    def __init__(self, stop: Stop, signalled: int, spoilt: int | None) -> None:
        self.stop, self.signalled, self.spoilt, self.step = stop, signalled, spoilt, 0

    def __call__(self, model: nn.Module, batch: Batch) -> Sums:
        self.step += 1
        if self.step == self.signalled and distributed.get_rank() == 1:
            self.stop.asked = "SIGTERM"
        losses = model(batch["x"].float()[:, None] / 64).square().squeeze(1)
        if self.spoilt is not None:
            losses = losses.where(batch["x"] != self.spoilt, float("nan"))
        return {"loss": ((losses * batch["mask"]).sum(), batch["mask"].sum())}


def numbers(steps: int) -> DevicePrefetcher:
    """Return this rank's share of so many batches of ROWS numbers, in order."""
    rank, ranks = distributed.get_rank(), distributed.get_world_size()
    sizes = {"global_batch_size": ROWS, "dp_rank": rank, "dp_size": ranks}
    loader = Loader(Numbers(steps * ROWS), shuffle=False, **sizes)
    return DevicePrefetcher(loader, torch.device("cpu"))


def fitted(
    folder: Path,
    late: bool,
    policy: str = "stop",
    every: Every = RARELY,
    signalled: int = 0,
    spoilt: int | None = SPOILT,
    evaluate_every: int = 100,
) -> dict[str, Any]:
    """Train on a rank; return how it ended, and in which order numbers were queued and read."""
    torch.manual_seed(0)
    left_out: list[tuple[int, int]] = []
    events: list[str] = []
    stop, health = Stop(), Health(policy, run=folder, record=left_out.extend)
    if late:
        stop._totals, health._offered = Late([]), Late(events)
    model = alone(nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters, lr=0.1)
    task = Squares(stop, signalled, spoilt)
    step = step_of(model, task, optimizer, health=health, asking=[stop])
    trainer = trainer_of(
        *(step, folder / "checkpoints", STEPS, every),
        loader=numbers(STEPS),
        evaluate_every=evaluate_every,
    )
    try:
        end = str(trainer.fit().finished)
    except (HealthError, RolledBack) as error:
        end = type(error).__name__ + str(error).partition(" (first")[0]
    return {
        "end": end,
        "step": trainer.session.step,
        "stopped": stop.reason,
        "left_out": left_out,
        "skipped": health.skipped,
        "events": events,
    }


def all_fitted(folder: Path, hows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Call `fitted` with each of `hows`, in a folder of its own."""
    return [fitted(folder / str(number), **how) for number, how in enumerate(hows)]


def trained(folder: Path, *hows: dict[str, Any]) -> list[dict[str, Any]]:
    """Train on two ranks, which end alike; return how."""
    for number in range(len(hows)):
        (folder / str(number) / "checkpoints").mkdir(parents=True)
    first, second = run_ranks(all_fitted, RANKS, folder, list(hows))
    assert first == second
    for number, found in enumerate(first):
        saved = checkpoints(folder / str(number) / "checkpoints")
        found["saved"] = sorted(int(path.name[5:]) for path in saved)
    return [*first]


FAILED = "HealthErrorloss is not finite since step 4"
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    # how, what a CPU does, what a GPU does where it differs
    "stop": ({}, {"end": FAILED, "step": 4, "saved": []}, {"step": 5}),
    "before a checkpoint": (
        {"every": Every(100, checkpoint=2)},
        {"end": FAILED, "step": 4, "saved": [2]},
        {},
    ),
    "before an evaluation": (
        {"every": RARELY, "evaluate_every": 4},
        {"end": FAILED, "step": 4, "saved": []},
        {},
    ),
    "before a log line": ({"every": Every(4, 100)}, {"end": FAILED, "step": 4}, {}),
    "rollback": (
        {"policy": "rollback"},
        {"end": "RolledBack", "step": 4, "left_out": [(4, 16)]},
        {"step": 5},
    ),
    "skip": ({"policy": "skip"}, {"end": "True", "step": 8, "saved": [8], "skipped": 1}, {}),
    "stop request": (
        {"signalled": 3, "spoilt": None},
        {"end": "False", "step": 3, "saved": [3], "stopped": "SIGTERM"},
        {"step": 4, "saved": [4]},
    ),
    "stop request and NaN": (
        {"signalled": 3},
        {"end": "False", "step": 3, "saved": [3], "stopped": "SIGTERM"},
        {"end": FAILED, "step": 4, "saved": []},
    ),
    "last step": (
        {"spoilt": STEPS * ROWS - 1},
        {"end": "HealthErrorloss is not finite since step 8", "step": 8, "saved": []},
        {},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_late_numbers_decide_alike_and_in_time(case: str, tmp_path: Path) -> None:
    how, on_cpu, on_gpu = CASES[case]
    hows = [{**how, "late": False}, {**how, "late": True}]
    wanted = [on_cpu, on_cpu | on_gpu]
    for expected, found in zip(wanted, trained(tmp_path, *hows), strict=True):
        assert {name: found[name] for name in expected} == expected


def test_a_late_problem_is_said_of_its_own_step(tmp_path: Path) -> None:
    trained(tmp_path, {"late": True})
    (file,) = (tmp_path / "0" / "nonfinite").iterdir()
    facts = json.loads(file.read_text())
    assert file.name == "step-00000004.json"
    assert facts["step"] == 4
    ((_, first), (_, second)) = facts["ranks"][0]["samples"]
    assert SPOILT in (first, second)
    assert (first // ROWS, second // ROWS) == (3, 3)
