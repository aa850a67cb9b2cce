"""The heartbeat of a run, progress.json."""

import json
import math
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hpctrain.engine.parts.display import Display, ProgressFile


def test_the_pulse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hpctrain.engine.parts.display.EVERY_S", 0.05)
    file = tmp_path / "progress.json"
    beat = ProgressFile(Display(), file, "val/loss")
    beat.start(10, 100)
    for step in range(11, 31):
        time.sleep(0.02)
        beat.advance(step)
    beat.report(30, {"val/loss": 0.5})
    with beat.doing("an evaluation"):
        while json.loads(file.read_text())["doing"] != "an evaluation":
            time.sleep(0.02)
    beat.close()
    content = json.loads(file.read_text())
    assert content["longest_step_s"] >= content["step_s"] >= 0.02
    assert content["doing"] == ""
    assert (content["step"], content["max_steps"], content["metric"]) == (30, 100, "val/loss")
    assert content["metrics"] == {"val/loss": 0.5}
    assert 0 < content["steps_per_s"] < 60  # each step sleeps for 0.02 s
    assert content["stepped"] <= content["time"]
    assert [path.name for path in tmp_path.iterdir()] == ["progress.json"]


def test_the_best_value_outlives_a_restart_unless_its_step_is_made_again(tmp_path: Path) -> None:
    def best(metric: str, first: int, values: dict[int, float]) -> Any:
        beat = ProgressFile(Display(), tmp_path / "progress.json", metric)
        beat.start(first, 100)
        for step, value in values.items():
            beat.report(step, {metric: value, "train/loss": 0.0})
        beat.close()
        return json.loads((tmp_path / "progress.json").read_text())["best"]

    first = best("val/loss", 0, {10: 0.5, 20: 0.3, 30: math.nan, 40: 0.4})
    assert first == {"value": 0.3, "step": 20}
    assert best("val/loss", 25, {30: 0.35}) == {"value": 0.3, "step": 20}
    assert best("val/loss", 10, {20: 0.4}) == {"value": 0.4, "step": 20}
    assert best("val/accuracy", 20, {30: 0.7, 40: 0.6}) == {"value": 0.7, "step": 30}
    assert best("val/width", 40, {50: 0.7}) is None  # the name tells no direction


def test_what_a_stop_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    clock = SimpleNamespace(time=lambda: now[0])
    monkeypatch.setattr("hpctrain.engine.parts.display.time", clock)

    def stop_s(*parts: tuple[str, float]) -> Any:
        beat = ProgressFile(Display(), tmp_path / "progress.json", "val/loss")
        beat.start(0, 100)
        for step, (what, seconds) in enumerate((("compile", 500.0), *parts), 1):
            with beat.doing(what):
                now[0] += seconds
            now[0] += 2.0
            beat.advance(step)
        beat.close()
        return json.loads((tmp_path / "progress.json").read_text())["stop_s"]

    assert stop_s(("an evaluation", 70.0)) == 0.0  # no save yet
    assert stop_s(("a checkpoint", 30.0), ("an evaluation", 70.0), ("a checkpoint", 20.0)) == 32.0
    assert stop_s(("an evaluation", 70.0)) == 32.0  # as the attempt before
    assert stop_s(("a checkpoint", 5.0)) == 7.0


def test_a_pulse_that_cannot_be_written_stops_nothing(tmp_path: Path) -> None:
    beat = ProgressFile(Display(), tmp_path / "gone" / "progress.json", "x")
    beat.start(0, 1)
    beat.advance(1)
    beat.close()
