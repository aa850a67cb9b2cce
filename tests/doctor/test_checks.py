"""Tests of the checks of a node: each planted fault is found, and a healthy node has none.

There is no GPU here: NVML is the stand-in of tests/monitor/nvml.py.
"""

import os
import socket
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from hpctrain.config.schema import Config
from hpctrain.distributed.ranks import RankInfo
from hpctrain.doctor.checks import (
    affinity,
    clocks,
    gpu_health,
    gpu_judgements,
    interfaces,
    limits,
)
from hpctrain.doctor.finding import Finding, worst
from hpctrain.doctor.probe import probe
from hpctrain.monitor import amd
from hpctrain.monitor.nvidia import Nvidia
from tests.doctor.planted_gpus import expectation
from tests.monitor.nvml import Nvml

GPU = "GPU-a"
ALONE = RankInfo.from_env({"HPCTRAIN_LAUNCHER": "single"})


def healthy(nvml: Nvml) -> None:
    nvml.ecc, nvml.used = (3, 0), 600_000_000  # the driver's own memory


def bad(findings: list[Finding]) -> dict[str, str]:
    return {one.check: one.verdict for one in findings if one.verdict in ("warn", "fail")}


def set_to(**values: Any) -> Callable[[Nvml], None]:
    return lambda nvml: vars(nvml).update(values)


@pytest.mark.parametrize(
    ("plant", "expected"),
    [
        (healthy, {}),
        (set_to(ecc=(0, 2)), {"GPU 0: ECC": "fail"}),
        (set_to(ecc=(20_000, 0)), {"GPU 0: ECC": "warn"}),
        (set_to(remapped=[1, 1, 1, 0]), {"GPU 0: retired memory": "warn"}),
        (set_to(remapped=[8, 9, 0, 1]), {"GPU 0: retired memory": "fail"}),
        (set_to(reasons=0x40), {"GPU 0: throttling": "fail"}),
        (set_to(reasons=0x20), {"GPU 0: throttling": "warn"}),
        (set_to(reasons=0x01), {}),  # nothing runs
        (set_to(mig=1), {"GPU 0: MIG": "warn"}),
        (set_to(limit=350), {"GPU 0: power limit": "warn"}),
        (set_to(pcie=((1, 16), (5, 16))), {}),  # at rest
        (set_to(pcie=((5, 4), (5, 16))), {"GPU 0: PCIe": "fail"}),
        (set_to(nvlinks=[1] * 12 + [0] * 6), {}),  # a PCIe board of the H100, by design
        (set_to(nvlinks=[0] * 18), {"GPU 0: NVLink": "warn"}),
        (set_to(nvlinks=[]), {}),
        (set_to(celsius=93), {"GPU 0: temperature": "warn"}),
        # Nobody is seen who uses the memory: a process of another container, or one that has died.
        (set_to(used=5_000_000_000), {"GPU 0: other processes": "warn"}),
        (set_to(used=60_000_000_000), {"GPU 0: other processes": "fail"}),
        (set_to(lost={GPU}), {"GPU 0": "fail"}),
    ],
)
def test_a_gpu(plant: Callable[[Nvml], None], expected: dict[str, str]) -> None:
    nvml = Nvml()
    healthy(nvml)
    plant(nvml)
    _, findings = gpu_health.checked([GPU], library=Nvidia(nvml))
    assert bad(findings) == expected
    assert all(one.cure for one in findings if one.verdict in ("warn", "fail"))
    # The kernel does not know the PCI address of a GPU that is not there, and says so.
    assert GPU in nvml.lost or "GPU 0: NUMA" in {
        one.check for one in findings if one.verdict == "unknown"
    }


@contextmanager
def sleeping(**variables: str) -> Iterator[int]:
    """Yield the number of a process with these variables in its environment."""
    with subprocess.Popen(["sleep", "600"], env=os.environ | variables) as process:
        try:
            yield process.pid
        finally:
            process.kill()


def test_what_others_have_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever they are; they slow the job down, and most of the memory would stop it."""
    nvml, check = Nvml(), "GPU 0: other processes"

    def found() -> dict[str, str]:
        return {
            one.verdict: one.found
            for one in gpu_health.checked([GPU], library=Nvidia(nvml))[1]
            if one.check == check
        }

    nvml.processes, nvml.used = [os.getpid()], 2**30 + 600_000_000
    assert found() == {"pass": "none"}
    monkeypatch.setattr(os, "getuid", lambda: 12345)  # now this process is another user's
    used = f"1.7 GB of 80.0 GB are in use, by processes {os.getpid()} of user 0"
    assert found() == {"warn": used.replace("user 0", f"user {os.stat('/proc/self').st_uid}")}
    nvml.processes = [2**22 + 1]  # in another container
    assert [*found()] == ["unknown"]
    monkeypatch.undo()
    with sleeping(SLURM_JOB_ID="7") as earlier:
        nvml.processes, nvml.used = [earlier], 60_000_000_000
        assert "another job of yours" in found()["fail"]
        nvml.processes = [os.getpid()]
        assert [*found()] == ["fail"]  # what it has is its own, the rest is nobody's


def test_an_amd_gpu_without_amdsmi_is_unknown(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The kernel's driver is there (a stand-in), its package is not."""
    monkeypatch.setattr(amd, "_KFD", tmp_path)
    facts, (found,) = gpu_health.checked([GPU])
    assert (facts, found.verdict) == ([], "unknown")
    assert "amdsmi cannot be imported" in found.found


def test_what_nvml_does_not_tell_is_said() -> None:
    """A GPU for games has no ECC, and a MIG instance has no health of its own."""
    _, findings = gpu_health.checked([GPU], library=Nvidia(Nvml()))
    assert "GPU 0: ECC" in {one.check for one in findings if one.verdict == "unknown"}
    _, findings = gpu_health.checked(["MIG-c"], library=Nvidia(Nvml()))
    assert [one.verdict for one in findings] == ["unknown"]
    facts, findings = gpu_health.checked(["GPU-x"], library=Nvidia(Nvml()))
    assert (facts, bad(findings)) == ([], {"GPU 0": "fail"})


def test_a_rank_with_one_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Slurm's --gpus-per-task=1: the GPU is number 0 to its rank, and the fourth of the node."""
    monkeypatch.setenv("SLURM_GPUS_ON_NODE", "4")
    asked = expectation(Config(output_dir=str(tmp_path)))
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


def test_pcie_is_judged_by_its_bandwidth() -> None:
    assert gpu_judgements.pcie_bandwidth(4, 8) == pytest.approx(
        gpu_judgements.pcie_bandwidth(3, 16), rel=0.01
    )
    assert gpu_judgements.pcie("GPU 0", (3, 8), (3, 16)).verdict == "warn"
    assert gpu_judgements.nvlink("GPU 0", 0, 4).verdict == "warn"


def test_limits() -> None:
    mib = 2**20
    sizes = (1, 48, 1024)
    assert [limits.shared_memory(n * mib, n * mib).verdict for n in sizes] == [
        *("fail", "warn", "pass")
    ]
    assert [limits.open_files(n, 4096).verdict for n in (256, 600, 1024)] == [
        "fail",
        "warn",
        "pass",
    ]
    assert "`ulimit -n 1024` to site.setup" in limits.open_files(256, 4096).cure
    assert "higher hard limit, which is 300 here" in limits.open_files(256, 300).cure
    assert limits.locked_memory(8 * mib, has_infiniband=False).verdict == "pass"
    assert limits.locked_memory(8 * mib, has_infiniband=True).verdict == "fail"
    assert limits.locked_memory(-1, has_infiniband=True).verdict == "pass"
    assert worst(limits.checked()) == "pass"  # this machine


def test_locked_memory_matters_only_to_gpus_of_several_nodes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "mlx5_0").mkdir()
    monkeypatch.setattr(limits, "_INFINIBAND", tmp_path)
    monkeypatch.setattr(limits.resource, "getrlimit", lambda _: (8 * 2**20, 8 * 2**20))
    asked = expectation(Config(output_dir=str(tmp_path)))
    alone, several = ALONE, RankInfo("slurm", 0, 0, 0, 2, 1, 2, "localhost", 1, ("localhost",) * 2)
    nvml = Nvml()

    def verdict(ranks: RankInfo, gpus: list[str]) -> str:
        seen = probe(asked, ranks, gpus, disks=False, library=Nvidia(nvml))
        (found,) = (one for one in seen.findings if one.check == "locked memory (ulimit -l)")
        return found.verdict

    assert [verdict(alone, [GPU]), verdict(several, []), verdict(several, [GPU])] == [
        *("pass", "pass", "fail")
    ]


def test_clocks() -> None:
    found = clocks.compared({"a": 1000.0, "b": 1000.3, "c": 1100.0})
    assert {host: one.verdict for host, one in found.items()} == {
        "a": "pass",
        "b": "pass",
        "c": "fail",
    }


def test_interfaces(tmp_path: Path) -> None:
    for name, state in (("lo", "unknown"), ("ib0", "up"), ("eth0", "down")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "operstate").write_text(state + "\n")

    def verdict(chosen: str | None, **env: str) -> str:
        return worst(interfaces.interface(chosen, env, tmp_path))

    assert verdict(None) == verdict("ib0") == verdict("ib") == "pass"
    assert verdict("eth0") == verdict("=ib") == verdict("ib0", NCCL_SOCKET_IFNAME="en0") == "fail"
    assert verdict("ib0", NCCL_SOCKET_IFNAME="^docker0") == "pass"


def test_a_port_in_use() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        number = other.getsockname()[1]
        found = interfaces.port("127.0.0.1", number, only_here=True)
    assert found.verdict == "fail"
    assert str(number) in found.found
    assert interfaces.port("127.0.0.1", number, only_here=True).verdict == "pass"


def test_host_names() -> None:
    assert interfaces.host_name(ALONE).verdict == "pass"
    several = RankInfo("slurm", 0, 0, 0, 2, 1, 2, "no-such-host.invalid", 1, ("a.invalid", "b"))
    found = interfaces.host_name(several)
    assert found.verdict == "fail"
    assert "a.invalid" in found.found


def test_cores(tmp_path: Path) -> None:
    assert affinity.enough(cpus=2, real=1, asked=4).verdict == "fail"
    assert affinity.enough(cpus=8, real=4, asked=4).verdict == "pass"
    device = tmp_path / "0000:17:00.0"
    device.mkdir()
    (device / "local_cpulist").write_text("0-3,8\n")
    near = [affinity.near_gpu("GPU 0", "00000000:17:00.0", cpus, tmp_path) for cpus in ({8}, {5})]
    assert [one.verdict for one in near] == ["pass", "warn"]
