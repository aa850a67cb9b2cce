"""Checks that the GPU benchmark runs, with a tiny model on the CPU."""

import json

import pytest

from tests.conftest import run_module


def test_it_prints_a_table() -> None:
    given = ["--device", "cpu", "--tiny", "--json"]
    done = run_module("tests.gpu.bench_gpt2", *given)
    rows = [line.split(" | ") for line in done.stdout.splitlines() if line.startswith("| ")]
    assert [row[0] for row in rows] == ["| loop", "| by hand", "| hpctrain"]
    for row in rows[1:]:
        assert float(row[1]) > 0
        assert row[3] == "-", "no file of hardware knows this CPU"
    figures = json.loads(done.stdout.splitlines()[-1])
    assert figures["ours_ms"] / figures["by_hand_ms"] == pytest.approx(figures["time_of_hand"])
