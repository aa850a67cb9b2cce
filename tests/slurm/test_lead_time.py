"""The lead time that a job is queued with, and a job that needs more; squeue is a stand-in."""

import json
import os
from pathlib import Path

import pytest

from hpctrain.cluster.slurm.requeue import GRACE, LEAD, LeadTime, lead_s, limits_s
from hpctrain.config.schema import LaunchConfig


def stopping_takes(seconds: float, run: Path) -> None:
    (run / "progress.json").write_text(json.dumps({"version": 1, "stop_s": seconds}))


def test_the_lead_time_follows_from_steps_and_saves(tmp_path: Path) -> None:
    launch = LaunchConfig(time_min=60)
    assert lead_s(launch, tmp_path) == launch.warn_s == 120
    for stop_s, lead in ((10.0, 120), (100.0, 230), (1e4, 900)):
        stopping_takes(stop_s, tmp_path)
        assert lead_s(launch, tmp_path) == lead
    assert lead_s(LaunchConfig(time_min=20, warn_s=600), tmp_path) == 600
    (tmp_path / "progress.json").write_text("damaged")
    assert lead_s(launch, tmp_path) == 120


def test_what_was_queued_with_less_stops_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "squeue").write_text(f"#!/bin/sh\necho Welcome\ncat {tmp_path}/left\n")
    (tmp_path / "squeue").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv(LEAD, "200")
    monkeypatch.setenv(GRACE, "")
    launch = LaunchConfig(time_min=60)
    assert limits_s() == {"SIGUSR2": 190.0}
    lead = LeadTime(launch, tmp_path, "7_1")
    (tmp_path / "left").write_text("5:00\n")
    stopping_takes(80.0, tmp_path)  # 190 s: Slurm's signal comes early enough
    assert lead.due_s() is None
    stopping_takes(110.0, tmp_path)  # 250 s
    assert lead.due_s() is None
    (tmp_path / "left").write_text("4:00\n")
    lead = LeadTime(launch, tmp_path, "7_1")
    assert lead.due_s() == pytest.approx(230, abs=20)
    (tmp_path / "left").write_text("1-00:00:00\n")  # it was extended meanwhile
    assert lead.due_s() is None
    (tmp_path / "left").write_text("UNLIMITED\n")
    assert LeadTime(launch, tmp_path, "7_1").due_s() is None
    monkeypatch.setenv(GRACE, "30")
    assert limits_s() == {"SIGUSR2": 190.0, "SIGTERM": 22.5}
