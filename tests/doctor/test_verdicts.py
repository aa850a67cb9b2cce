"""The table of docs/doctor.md says of each check whether it fails or only warns; this proves it.

Each row is judged here with faults and with what a healthy node has. There is no GPU: NVML is the
stand-in of tests/monitor/nvml.py.
"""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from hpctrain.config.schema import Config
from hpctrain.doctor import comparison
from hpctrain.doctor.checks import (
    clocks,
    file_systems,
    gpu_health,
    gpu_judgements,
    infiniband,
    installed,
    interfaces,
    limits,
    reach,
)
from hpctrain.doctor.finding import Finding
from hpctrain.doctor.probe import Expectation, Probe, probe
from hpctrain.monitor.nvidia import Nvidia
from hpctrain.rendezvous.ranks import RankInfo
from hpctrain.units import GIB, MIB
from tests.conftest import ROOT
from tests.doctor.test_comparison import GPU, H100, VERSIONS, look
from tests.monitor.nvml import Nvml

FAIL, WARN = "fail", "warn"
OTHER = VERSIONS | {"torch": "2.6", "system": "Linux-6"}


def of_gpu(nccl: bool = False, **broken: int) -> list[Finding]:
    nvml = Nvml()
    nvml.broken = broken
    return gpu_health.checked(["GPU-a"], library=Nvidia(nvml), nccl=nccl)[1][:1]


def of_looks(*looks: Probe) -> list[Finding]:
    return [one for found in comparison.compared(looks).values() for one in found]


def of_gpus(**other: object) -> list[Finding]:
    changed = replace(GPU, **other)  # type: ignore[arg-type]
    return of_looks(look(0), look(1), look(2, gpus=[changed]))


def of_speed(slowest: float) -> list[Finding]:
    return of_looks(
        *(look(n, figures={"matmul_tflops": v}) for n, v in enumerate((slowest, 100, 100)))
    )


def of_link(slowest: float) -> list[Finding]:
    speeds = {("a", "b"): 900.0, ("b", "c"): 900.0, ("a", "c"): 900.0, ("c", "d"): slowest}
    return [*comparison.links(speeds).values()]


def of_names(other: str, rank_0: str) -> list[Finding]:
    ranks = RankInfo("slurm", 0, 0, 0, 2, 1, 2, rank_0, 0, (other,))
    return [interfaces.host_name(ranks)]


def of_scratch(folder: Path, stage: str) -> list[Finding]:
    config = Config(output_dir=str(folder))
    config.data.stage, config.data.path = stage, ""
    alone = RankInfo.from_env({"HPCTRAIN_LAUNCHER": "single"})
    seen = probe(Expectation.of(config), alone, [], disks=False).findings
    return [one for one in seen if one.check == "scratch: free space"]


def of_disk(free: int, *, locks: bool = True) -> list[Finding]:
    seen = file_systems.Probe(1e9, 1e9, 0.001, 0.0, locks)
    free_space = file_systems.free_space("output_dir", free, 2**50)
    return [free_space, *file_systems.judged("output_dir", seen)]


def of_ports(folder: Path) -> list[Finding]:
    port = folder / "mlx5_0" / "ports" / "1"
    port.mkdir(parents=True)
    (port / "state").write_text("1: DOWN")
    return [*infiniband.checked(folder)]


def of_data(folder: Path) -> list[Finding]:
    slow = file_systems._speed("data.path: read speed", 1e6, file_systems._WARN_READ, "Copy it.")
    return [*file_systems.readable("data.path", folder / "none"), slow]


def seen_of_processes(used: int) -> Finding:
    return gpu_judgements.processes("other processes", {}, used, 80 * GIB)


judge = gpu_judgements
ROWS: dict[str, Callable[[Path], list[Finding]]] = {
    "GPUs": lambda _: [*of_gpu(True, nvmlInit=12), *of_gpu(nvmlInit=12)],
    "GPU 0": lambda _: [*of_gpu(nvmlDeviceGetName=15), *of_gpu(nvmlDeviceGetHandleByUUID=6)],
    "number of GPUs": lambda _: of_looks(look(0, uuids=["a"], gpus_given=2)),
    "same GPUs": lambda _: [
        *of_gpus(name="X2"),
        *(found for links in (17, 0) for found in of_gpus(nvlinks=links)),
        *of_gpus(driver="580.1", memory_bytes=(80 << 30) - MIB),
    ],
    "ECC": lambda _: [judge.ecc("ECC", 0, 1), judge.ecc("ECC", None, None)],
    "retired memory": lambda _: [
        judge.retired("retired memory", "1 row", waits=not failed, failed=failed)
        for failed in (True, False)
    ],
    "throttling": lambda _: [
        judge.throttling("throttling", ["heat"], []),
        judge.throttling("throttling", [], ["heat"]),
    ],
    "temperature": lambda _: [
        judge.temperature("temperature", 101, 100),
        judge.temperature("temperature", 86, None),
    ],
    "other processes": lambda _: [seen_of_processes(60 * GIB), seen_of_processes(9 * GIB)],
    "MIG": lambda _: [judge.mig("MIG", True)],
    "power limit": lambda _: [judge.power_limit("power limit", 300, 700, "nvidia-smi -pl")],
    "NUMA": lambda folder: [judge.numa("NUMA", "00000000:17:00.0", folder)],
    "PCIe": lambda _: [judge.pcie("PCIe", (4, 4), (4, 16)), judge.pcie("PCIe", (4, 8), (4, 16))],
    "NVLink": lambda _: [judge.nvlink("NVLink", 0, 18), judge.nvlink("NVLink", 12, 18)],
    "rank 0: matmul_tflops": lambda _: [*of_speed(40), *of_speed(70)],
    "link to other nodes": lambda _: [*of_link(400), *of_link(600)],
    "network against the hardware": lambda _: of_looks(
        look(0, gpus=[replace(H100, power_w=700.0)], figures={"pair_1_mb_s": 125.0})
    ),
    "InfiniBand": of_ports,
    "InfiniBand library": lambda _: [infiniband.library()],
    "locked memory (ulimit -l)": lambda _: [
        limits.locked_memory(8 * MIB, True),
        limits.locked_memory(GIB, True),
        limits.locked_memory(8 * MIB, False),
    ],
    "/dev/shm": lambda _: [limits.shared_memory(n * MIB, n * MIB, 2) for n in (20, 512, 1024)],
    "open files (ulimit -n)": lambda _: [limits.open_files(n, n) for n in (500, 1000, 1024)],
    "CPU cores": lambda _: [limits.cpus(n, n, 8) for n in (4, 7, 8)],
    "host names": lambda _: [
        *of_names("no.invalid", "localhost"),
        *of_names("localhost", "no.invalid"),
    ],
    "interface": lambda folder: [
        found
        for nccl in (True, False)
        for found in interfaces.interface(None, nccl, {"NCCL_SOCKET_IFNAME": "ib0"}, folder)
    ],
    "C compiler for Triton": lambda _: [installed.compiler(True), installed.compiler(False)],
    "TCP to other nodes": lambda _: [
        *reach.judged({"a": {"b": "refused", "c": "refused"}}, "abc").values()
    ],
    "clock": lambda _: [*clocks.compared({"a": 0.0, "b": 0.0, "c": 99.0}).values()],
    "output_dir": lambda _: [*of_disk(0), *of_disk(2 * GIB, locks=False)],
    "scratch": lambda folder: [*of_scratch(folder, "node"), *of_scratch(folder, "auto")],
    "data.path": of_data,
    "same torch": lambda _: of_looks(look(0), look(1), look(2, versions=OTHER)),
    "same system": lambda _: of_looks(look(0), look(1), look(2, versions=OTHER)),
}


def documented() -> dict[str, dict[str, bool]]:
    """Return of each row of the table whether its columns for fail and warn say something."""
    text = (ROOT / "docs" / "doctor.md").read_text()
    table = text.partition("### What fails")[2].partition("\n\n| check")[2].partition("\n\n")[0]
    rows = {}
    for line in table.splitlines()[2:]:
        name, fails, warns = (cell.strip() for cell in line.split("|")[1:4])
        (title,) = re.findall("^`(.*?)`", name)
        rows[title] = {FAIL: bool(fails), WARN: bool(warns)}
    return rows


def test_each_check_has_its_row() -> None:
    assert [*documented()] == [*ROWS]


@pytest.mark.parametrize("name", ROWS)
def test_a_check_fails_and_warns_as_the_table_says(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    if name == "C compiler for Triton":
        monkeypatch.setattr(installed.sysconfig, "get_path", lambda _: str(tmp_path))
    monkeypatch.setattr(infiniband, "_LIBRARY", "libnone.so.1")
    if name == "NUMA":
        (tmp_path / "0000:17:00.0").mkdir()
        (tmp_path / "0000:17:00.0" / "local_cpulist").write_text("4000\n")
    if name == "scratch":
        monkeypatch.setattr(file_systems, "_FAIL_FREE", 2**60)
    found = [one for one in ROWS[name](tmp_path) if one.check.startswith(name)]
    said = {one.verdict for one in found}
    assert {verdict: verdict in said for verdict in (FAIL, WARN)} == documented()[name]
    assert all(one.cure for one in found if one.verdict in (FAIL, WARN))
