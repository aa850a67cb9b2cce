"""train.profile: a trace of some steps, and what the report says of it."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hpctrain.config.schema import TrainConfig
from hpctrain.config.schema.key import keys
from hpctrain.report.account.trace import traces
from tests.conftest import Completed, runs
from tests.report.accounts import account


def write(folder: Path, events: list[dict[str, Any]]) -> None:
    (folder / "profile").mkdir(exist_ok=True)
    with gzip.open(folder / "profile" / "steps-4-5.rank0.json.gz", "wt") as file:
        json.dump({"traceEvents": [{"ph": "X", "pid": 1, **event} for event in events]}, file)


def event(name: str, cat: str, tid: int, begin_ms: int, end_ms: int, **args: str) -> dict[str, Any]:
    where = {"ts": 1000 * begin_ms, "dur": 1000 * (end_ms - begin_ms)}
    return {"name": name, "cat": cat, "tid": tid, "args": args, **where}


@pytest.mark.parametrize("cuda", [False, True])
def test_own_times_and_covered_communication(tmp_path: Path, cuda: bool) -> None:
    """By hand: 10 ms of communication, of which 4 ms beside work. Of the GPU only its format."""
    outer = event("linear", "kernel" if cuda else "cpu_op", 7, 0, 10)
    inner = [] if cuda else [event("matmul", "cpu_op", 7, 2, 8)]
    talk = event("sum", "kernel" if cuda else "user_annotation", 9, 6, 16)
    talk["args"] = {"Collective name": "allreduce"} if cuda else {}
    write(tmp_path, [outer, *inner, talk])
    (trace,) = traces(tmp_path, [])
    assert trace.communication_s == pytest.approx(0.010)
    assert trace.covered_s == pytest.approx(0.004)
    own = {name: seconds for name, seconds, _ in trace.operators}
    assert own == pytest.approx({"linear": 0.010} if cuda else {"linear": 0.004, "matmul": 0.006})
    assert "5 ms of communication in a step, 40% of it covered" in trace.lines()[-1]


def test_a_trace_without_steps_and_a_damaged_one_are_named(tmp_path: Path) -> None:
    write(tmp_path, [])
    left_out: list[str] = []
    assert traces(tmp_path, left_out) == []
    (tmp_path / "profile" / "steps-4-5.rank0.json.gz").write_bytes(b"no trace")
    assert traces(tmp_path, left_out) == []
    assert "a trace without operators, so without steps" in left_out[0]
    assert "no trace of torch's profiler" in left_out[1]


@pytest.mark.parametrize(
    ("value", "wrong"),
    [
        (None, ""),
        ("10-15", ""),
        ("15", "a range of steps, such as 10-15"),
        ("1-5", "begin at step 2 or later"),
        ("9-5", "not end before that"),
        ("2-2000", "at most 100 steps"),
    ],
)
def test_the_range_is_checked(value: str | None, wrong: str) -> None:
    (rule,) = (key.rule for key in keys(TrainConfig) if key.name == "profile")
    problem = rule.problem("train.profile", value)
    assert (wrong in problem) if wrong else not problem


def test_a_run_records_its_steps(train: Callable[..., Completed], tmp_path: Path) -> None:
    train("train.max_epochs=1", "train.profile=4-6", "tracking.enabled=false")
    (run,) = runs(tmp_path / "runs")
    said = account(run).profile
    assert any("steps 4 to 6: aten::addmm" in line for line in said), said
