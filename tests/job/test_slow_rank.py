"""A training in which one rank works longer in its task: the right rank is named everywhere."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import Completed, journal, only_run, run_json, run_module

TASK = """
import os, time
from hpctrain.tasks import Classification

class Slow(Classification):
    def sums(self, outputs, batch):
        if os.environ["RANK"] == "0":
            end = time.thread_time() + 0.08
            while time.thread_time() < end:
                pass
        return super().sums(outputs, batch)
"""
SHARDED = ["parallel.dp_shard=2", "parallel.zero=3"]


@pytest.mark.slow
@pytest.mark.parametrize("layout", [[], SHARDED], ids=["ddp", "zero3"])
def test_a_rank_that_works_longer_is_named_everywhere(
    layout: list[str], train: Callable[..., Completed], tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text(TASK)
    often = ["train.max_steps=120", "train.log_every=10", "task._target_=mine.Slow", *layout]
    mine = {"PYTHONPATH": str(tmp_path)}
    done = train(*often, "tracking.upload=false", ranks=2, new=True, **mine)
    run = only_run(tmp_path)
    (note,) = run_json(run)["notes"]
    assert note["text"].startswith("rank 0")
    assert note["text"] in " ".join(done.stderr.split())
    bodies = journal(run)
    assert note["text"] in [body.get("text") for body in bodies]
    named = [body.get("metrics", {}).get("perf/slowest_rank") for body in bodies]
    assert {*named} - {None} == {0.0}
    (row,) = json.loads(run_module("hpctrain", "status", "--json", cwd=tmp_path).stdout)
    assert note["text"] in row["reason"]
    top = run_module("hpctrain", "status", "--live", "--once", "--json", cwd=tmp_path).stdout
    assert note["text"] in json.loads(top)["notes"]
    report = json.loads(run_module("hpctrain", "report", str(run), "--json", cwd=tmp_path).stdout)
    found = report[0] if isinstance(report, list) else report
    assert found["time"]["slow_rank"] > found["time"]["communication"]
    assert not any("global_batch_size" in text for text in found["notes"])
