"""What `doctor` prints: each host, each cure once, and whole words in a pipe."""

import pytest

from hpctrain.doctor import table
from hpctrain.doctor.finding import Finding, good, unknown


def test_nodes(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    hot = Finding("GPU 0: temperature", "warn", "93 degrees", "below 85", "Look.")
    found = [good("clock", "+0.0 s"), unknown("InfiniBand", "no adapter")]
    places = {f"gpu-a100-node{n}": [*found, *([hot] if n > 1 else [])] for n in range(4)}
    figures = {"matmul_tflops": 612.3, "all_reduce_latency_us": 41.2, "pair_1_mb_s": 900.0}
    table.show(places, dict.fromkeys(places, figures))
    said = capsys.readouterr().out
    rows = [line.split() for line in said.splitlines()]
    assert ["node", "verdict", "matmul", "TFLOP/s", "latency", "us"] in rows
    assert ["gpu-a100-node0", "pass", "612.3", "41.2"] in rows
    assert ["gpu-a100-node2", "warn", "612.3", "41.2"] in rows
    assert "unknown (--json says why): InfiniBand\n" in said
    assert said.count("warn: GPU 0: temperature: Look.") == 1
    path = f"/scratch/{'project/' * 12}mlflow.db"  # a login node tells all, without figures
    table.show({"here": [Finding("MLflow", "pass", f"{path} is intact")]}, {})
    assert path in capsys.readouterr().out.split()
