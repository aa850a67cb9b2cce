"""A run that is out of memory goes on with smaller micro-batches. The error is simulated."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from hpctrain.config.composing.compose_sweep import Composer
from hpctrain.config.validate import validate
from hpctrain.errors import ConfigError
from tests.conftest import Completed, only_run, run_json

Train = Callable[..., Completed]
TASK = """\
import torch
from hpctrain.tasks import Classification

class Limited(Classification):
    def __call__(self, model, batch):
        if model.training and len(batch["mask"]) > 16:
            raise torch.OutOfMemoryError("simulated")
        return super().__call__(model, batch)
"""
COMMON = ("task._target_=limited.Limited", "train.max_steps=5", "tracking.upload=false")


@pytest.mark.slow
def test_the_next_attempt_of_one_process_has_smaller_ones(train: Train, tmp_path: Path) -> None:
    (tmp_path / "limited.py").write_text(TASK.replace("> 16", "> 32"))
    train(*COMMON, PYTHONPATH=str(tmp_path), code=1)
    done = train(*COMMON, PYTHONPATH=str(tmp_path))
    assert "micro-batches of 32 rows, as the attempt before has found" in done.stderr


def test_an_error_on_one_of_two_ranks_ends_both_and_the_next_attempt_has_smaller_ones(
    train: Train, tmp_path: Path
) -> None:
    on_rank_1 = TASK.replace("if model", "if os.environ['RANK'] == '1' and model")
    # NCCL's text, since there is no GPU: it allocates beside torch.
    text = "NCCL error in: f:1, unhandled cuda error\\nLast error:\\nCuda failure 2 'out of memory'"
    on_rank_1 = on_rank_1.replace(
        'OutOfMemoryError("simulated")', f'distributed.DistBackendError("{text}")'
    )
    # NCCL's destroy waits for the other ranks, which wait for this one. gloo's is replaced.
    waits = "            torch.distributed.destroy_process_group = lambda: time.sleep(1000)\n"
    on_rank_1 = on_rank_1.replace("            raise", f"{waits}            raise")
    (tmp_path / "limited.py").write_text(f"import os, time\n{on_rank_1}")
    for code, state in ((1, "failed"), (0, "finished")):
        done = train(*COMMON, ranks=2, code=code, PYTHONPATH=str(tmp_path))
        assert run_json(only_run(tmp_path))["state"] == state
        assert run_json(only_run(tmp_path))["micro_batch_rows"] == 16
        if code:
            assert "out of memory with micro-batches of 32 rows; the run goes on" in done.stderr
        else:
            assert "micro-batches of 16 rows, as the attempt before has found" in done.stderr


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("train.micro_batch_size=auto", "measures a GPU's memory"),
        ("train.micro_batch_size=5", "train.micro_batch_size 5 = 5: use 60 or 65"),
        ("train.micro_batch_size=many", "train.micro_batch_size='many': it must be a number of"),
        ("train.micro_batch_size=8 train.accumulate=2", "give one"),
    ],
)
def test_sizes_that_cannot_be(composer: Composer, given: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        validate(composer.typed(["experiment=digits", *given.split(), "parallel.device=cpu"]), 1)
