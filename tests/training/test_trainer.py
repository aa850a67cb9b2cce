"""The training loop: an evaluation ends when the ranks agree on a stop request or on an error."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import distributed

from hpctrain.config.rules.metrics import RequestedMetric
from hpctrain.data.shards.types import Batch
from hpctrain.engine.loop import Trainer
from hpctrain.engine.supervised.evaluations import Evaluations
from hpctrain.errors import ConfigError
from tests.ranks import run_ranks
from tests.steps import Every, batch, make, trainer_of


class Batches:
    """Nine batches of an evaluation; before batch `signalled` this rank gets a stop request."""

    def __init__(self, signalled: int | None) -> None:
        self.given, self.signalled = 0, signalled
        self.trainer: Trainer

    def load_state_dict(self, state: dict[str, int]) -> None:
        assert state == {"consumed": 0}

    def __iter__(self) -> Iterator[Batch]:
        for number in range(9):
            if number == self.signalled:
                self.trainer.session.stop.asked = "SIGTERM"
            self.given += 1
            yield batch(8, number)


def due(feed: Batches, asked: str = "") -> Trainer:
    """Return a trainer that is due to evaluate on the batches."""
    feed.trainer = trainer_of(
        *(make(), Path("unused"), 10, Every(log=1, checkpoint=1)),
        evaluations={"val": feed},
        asked=[RequestedMetric(asked)],
    )
    evaluations_of(feed.trainer).due = True
    return feed.trainer


def evaluations_of(trainer: Trainer) -> Evaluations:
    return next(part for part in trainer.session.parts if isinstance(part, Evaluations))


def evaluated(signals: dict[int, int]) -> tuple[bool, int, list[str]]:
    """Evaluate on a rank that gets a stop request before the batch `signals[rank]`.

    Returns:
        Whether the evaluation was made, the number of batches, and the names of the metrics.
    """
    feed = Batches(signals.get(distributed.get_rank()))
    trainer = due(feed)
    before = torch.get_rng_state()
    evaluations = evaluations_of(trainer)
    made = evaluations.between(0)
    assert made is not evaluations.due
    assert trainer.train_step.model.module.training
    assert torch.equal(torch.get_rng_state(), before)
    return made, feed.given, sorted(trainer.session.metrics)


@pytest.mark.parametrize(
    ("signals", "made", "batches"),
    [
        ({}, True, 9),
        ({1: 3}, False, 5),  # the flags of batch 3 are read in batch 4
        ({0: 7, 1: 2, 2: 5}, False, 4),
        ({1: 8}, True, 9),  # too late for this evaluation: the loop reads it after the next step
    ],
)
def test_ranks_agree_to_leave_an_evaluation(
    signals: dict[int, int], made: bool, batches: int
) -> None:
    names = ["val/accuracy", "val/loss"] if made else []
    assert run_ranks(evaluated, 3, signals) == [(made, batches, names)] * 3


def refused(asked: str) -> str:
    """Evaluate on a rank, asked for this metric; return the error."""
    try:
        evaluations_of(due(Batches(None), asked)).between(0)
    except ConfigError as error:
        return str(error)
    return ""


def test_all_ranks_refuse_a_metric_that_the_evaluation_does_not_have() -> None:
    said = "metric=val/los: did you mean val/loss? this run produces val/loss, val/accuracy"
    assert run_ranks(refused, 2, "val/los") == [said] * 2
    assert run_ranks(refused, 2, "val/loss") == run_ranks(refused, 2, "train/x") == [""] * 2
