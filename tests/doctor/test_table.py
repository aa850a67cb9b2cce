"""Tests of what `doctor` prints: whole words and numbers at 80 columns and in a pipe."""

import pytest

from hpctrain.doctor import table
from hpctrain.doctor.finding import Finding, good, unknown

GPU = {"matmul_tflops": 612.3, "memory_gb_s": 2891.7, "to_gpu_gb_s": 51.24, "read_mb_s": 999.96}
GPU |= {"all_reduce_latency_us": 41.2, "pair_1_mb_s": 900.0, "pair_2_mb_s": 21_000.0}
GPU |= {"all_reduce_65536_bus_gb_s": 0.00876, "all_reduce_268435456_bus_gb_s": 370.0}
GPU |= {"all_reduce_in_node_65536_bus_gb_s": 1.2, "all_reduce_in_node_268435456_bus_gb_s": 371.4}
CPU = {"matmul_tflops": 0.0903, "memory_gb_s": 16.9, "all_reduce_latency_us": 4090.0}


@pytest.fixture(params=["80", ""], ids=["80 columns", "a pipe"])
def columns(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    if request.param:
        monkeypatch.setenv("COLUMNS", request.param)


@pytest.mark.usefixtures("columns")
def test_nodes(capsys: pytest.CaptureFixture[str]) -> None:
    nodes = [f"gpu-a100-node{n}" for n in range(4)]
    hot = Finding("GPU 0: temperature", "warn", "93 degrees", "below 85", "Look.")
    places = {
        host: [
            good("clock", "+0.0 s"),
            unknown("InfiniBand", "no adapter"),
            *(unknown(f"GPU {n}: ECC", "not told") for n in range(8)),
            *([hot] if host == nodes[2] else []),
            *([hot] if host == nodes[3] else []),
        ]
        for host in nodes
    }
    table.print_nodes(places, dict.fromkeys(nodes, GPU))
    said = capsys.readouterr().out
    rows = [line.split() for line in said.splitlines()]
    heads = "node verdict matmul memory to GPU reading in node network"
    assert heads.split() in rows
    assert ["TFLOP/s", "TB/s", "GB/s", "MB/s", "GB/s", "GB/s"] in rows
    assert [nodes[0], "pass", "612", "2.89", "51.2", "1,000", "371", "21"] in rows
    assert [nodes[2], "warn", "612", "2.89", "51.2", "1,000", "371", "21"] in rows
    # Four nodes without an answer are one line, and so is the cure of two.
    assert said.count("unknown") == 1
    assert "unknown (--json says why): InfiniBand, GPUs: ECC\n" in said
    assert said.count("warn: GPU 0: temperature: Look.") == 1
    assert "latency 41.2 us, 64 KiB 8.76 MB/s, 256 MiB 370 GB/s" in said
    tables = [line for line in said.splitlines() if not line.startswith(("all-", "warn:", "unk"))]
    assert max(map(len, tables)) <= 80
    table.print_nodes(places, dict.fromkeys(nodes, CPU))
    said = capsys.readouterr().out
    assert ["GFLOP/s", "GB/s"] in [line.split() for line in said.splitlines()]
    assert "latency 4.09 ms" in said
    table.print_nodes({"a": []}, {})  # nothing was measured
    assert ["a", "pass"] in [line.split() for line in capsys.readouterr().out.splitlines()]


@pytest.mark.usefixtures("columns")
def test_a_long_path_is_whole(capsys: pytest.CaptureFixture[str]) -> None:
    path = f"/scratch/{'project/' * 12}mlflow.db"
    table.print_findings("here", [Finding("MLflow", "pass", f"{path} is intact")])
    assert path in capsys.readouterr().out.split()
