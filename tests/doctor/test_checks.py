"""Tests of the checks of a node: each planted fault is found, and a healthy node has none.

Those of GPUs are in test_gpu_health.py. There is no GPU here: NVML is the stand-in of
tests/monitor/nvml.py.
"""

import py_compile
import socket
import sys
from dataclasses import replace
from importlib.util import spec_from_file_location
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hpctrain.cluster.ranks.ranks import RankInfo
from hpctrain.config.schema import Config
from hpctrain.insight.doctor.checks import installed, limits, network
from hpctrain.insight.doctor.finding import Finding, good, worst
from hpctrain.insight.doctor.probe import probe
from hpctrain.insight.monitor.nvidia import Nvidia
from tests.doctor.asked import expected_of
from tests.monitor.nvml import Nvml

GPU = "GPU-a"
ALONE = RankInfo.from_env({"HPCTRAIN_LAUNCHER": "single"})


def port(folder: Path, adapter: str, state: str = "4: ACTIVE") -> None:
    place = folder / adapter / "ports" / "1"
    place.mkdir(parents=True, exist_ok=True)
    (place / "state").write_text(f"{state}\n")
    (place / "rate").write_text("400 Gb/sec (4X NDR)\n")


def bad(findings: list[Finding]) -> dict[str, str]:
    return {one.check: one.result for one in findings if one.result in ("warn", "fail")}


def test_a_rank_with_one_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Slurm's --gpus-per-task=1: the GPU is number 0 to its rank, and the fourth of the node."""
    monkeypatch.setenv("SLURM_GPUS_ON_NODE", "4")
    asked = expected_of(Config(output_dir=str(tmp_path)))
    nvml = Nvml()
    nvml.ecc, nvml.used = (0, 1), 0
    seen = probe(
        asked,
        RankInfo("slurm", 7, 3, 1, 8, 4, 2, "", 0, ()),
        [GPU],
        disks=False,
        library=Nvidia(nvml),
    )
    assert bad(seen.findings) == {"GPU 3: ECC": "fail"}
    assert (seen.uuids, seen.gpus_given, seen.peers) == ([GPU], 4, 4)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-a,MIG-b")  # torch sees one of them
    ranks = RankInfo("slurm", 1, 1, 0, 2, 2, 1, "", 0, ())
    assert probe(asked, ranks, ["MIG-c"], disks=False, library=Nvidia(nvml)).gpus_given == 0


def test_what_infiniband_needs_matters_only_to_nccl_between_nodes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """8 MiB of locked memory stop the job only where NCCL uses adapters by their library."""
    here, nvml = tmp_path / "here", Nvml()
    here.mkdir()
    port(tmp_path, "mlx5_0")
    monkeypatch.setattr(network, "_ports", lambda _: [tmp_path / "mlx5_0" / "ports" / "1"])
    monkeypatch.setattr(limits.resource, "getrlimit", lambda _: (8 * 2**20, 8 * 2**20))
    alone, several = ALONE, RankInfo("slurm", 0, 0, 0, 2, 1, 2, "localhost", 1, ("localhost",) * 2)

    def verdicts(ranks: RankInfo, gpus: list[str], backend: str = "auto") -> list[str]:
        asked = expected_of(Config(output_dir=str(here)))
        asked = replace(asked, parallel=replace(asked.parallel, backend=backend))
        found = probe(asked, ranks, gpus, disks=False, library=Nvidia(nvml)).findings
        names = "locked memory (ulimit -l)", "InfiniBand library"
        return [one.result for one in found if one.check in names]

    monkeypatch.setattr(network, "infiniband_library", lambda: good("InfiniBand library", "loads"))
    assert verdicts(alone, [GPU]) == verdicts(several, []) == ["pass"]
    assert verdicts(several, [GPU], "gloo") == ["pass"]
    assert verdicts(several, [GPU]) == ["pass", "fail"]
    monkeypatch.setattr(
        network, "infiniband_library", lambda: Finding("InfiniBand library", "warn", "")
    )
    assert verdicts(several, [GPU]) == ["warn", "pass"]  # NCCL then takes TCP
    port(tmp_path, "mlx5_0", state="1: DOWN")
    assert verdicts(several, [GPU]) == ["pass"]


def test_torch_without_bytecode_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Found on a machine where the first step of each run came after 40 seconds."""
    source = tmp_path / "__init__.py"
    source.touch()
    spec = spec_from_file_location("torch", source)
    monkeypatch.setattr(installed, "find_spec", lambda _: spec)

    def told() -> list[Finding]:
        return [each for each in installed.checked() if each.check == "bytecode of torch"]

    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    assert not told(), "Python keeps it at the first start"
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    (found,) = told()
    assert found.result == "warn"
    assert f"compileall -q -j 0 {tmp_path.parent}" in found.cure
    py_compile.compile(str(source))
    assert not told()


def test_interfaces(tmp_path: Path) -> None:
    for name, state in (("lo", "unknown"), ("ib0", "up"), ("eth0", "down")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "operstate").write_text(state + "\n")

    def verdict(chosen: str | None, nccl: bool = True, **env: str) -> str:
        return worst(network.interface(chosen, nccl, env, tmp_path))

    assert verdict(None) == verdict("ib0") == verdict("ib") == "pass"
    assert verdict("eth0") == verdict("=ib") == verdict("ib0", NCCL_SOCKET_IFNAME="en0") == "fail"
    assert verdict("ib0", NCCL_SOCKET_IFNAME="^docker0") == "pass"
    assert verdict(None, nccl=False, NCCL_SOCKET_IFNAME="en0") == "pass"


def test_a_port_in_use() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        number = other.getsockname()[1]
        found = network.port("127.0.0.1", number, only_here=True)
    assert found.result == "fail"
    assert str(number) in found.found
    assert network.port("127.0.0.1", number, only_here=True).result == "pass"


def test_infiniband(tmp_path: Path) -> None:
    assert network.infiniband_rates(tmp_path / "no") == "none"
    for adapter in ("mlx5_0", "mlx5_1"):
        port(tmp_path, adapter)
    assert network.infiniband_rates(tmp_path) == "2 x 400 Gb/sec (4X NDR)"
    port(tmp_path, "mlx5_1", state="1: DOWN")
    assert network.infiniband_rates(tmp_path) == "1 x 400 Gb/sec (4X NDR)"  # unlike on other nodes
    # NCCL uses what is active, unless it is told to use something else.
    assert network.uses_infiniband(tmp_path, {"NCCL_IB_DISABLE": "0"})
    for variable, value in (("NCCL_IB_DISABLE", "1"), ("NCCL_NET", "Socket"), ("NCCL_NET", "OFI")):
        assert not network.uses_infiniband(tmp_path, {variable: value})
    port(tmp_path, "mlx5_0", state="1: DOWN")
    assert not network.uses_infiniband(tmp_path, {})


def test_the_library_of_infiniband(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for it counts the devices that have a provider."""
    counts = iter((0, 2))

    def list_devices(count: Any) -> int:
        count._obj.value = next(counts)
        return 0

    verbs = SimpleNamespace(ibv_get_device_list=list_devices)
    monkeypatch.setattr(network.ctypes, "CDLL", lambda name: verbs)
    found = network.infiniband_library()
    assert (found.result, "NCCL falls back to TCP" in found.found) == ("warn", True)
    assert network.infiniband_library().result == "pass"
