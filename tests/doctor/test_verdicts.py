"""The table of docs/doctor.md says of each check whether it fails or only warns; this proves it.

Each row is judged here with faults and with what a healthy node has. There is no GPU: NVML is the
stand-in of tests/monitor/nvml.py.
"""

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from hpctrain.base.units import GIB, MIB
from hpctrain.cluster.ranks.ranks import RankInfo
from hpctrain.config.schema import Config
from hpctrain.insight.doctor import comparison
from hpctrain.insight.doctor.checks import file_systems, gpu_health, limits, network
from hpctrain.insight.doctor.finding import Finding
from hpctrain.insight.doctor.probe import Probe, probe
from hpctrain.insight.monitor.nvidia import Nvidia
from tests.conftest import ROOT
from tests.doctor.asked import expected_of
from tests.doctor.test_comparison import GPU, VERSIONS, look
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
    return [network.host_name(ranks)]


def of_scratch(folder: Path, stage: str) -> list[Finding]:
    config = Config(output_dir=str(folder))
    config.data.stage, config.data.path = stage, ""
    alone = RankInfo.from_env({"HPCTRAIN_LAUNCHER": "single"})
    found = probe(expected_of(config), alone, [], disks=False).findings
    return [one for one in found if one.check == "scratch: free space"]


def seen(judge: Callable[..., Finding], *given: tuple[Any, ...]) -> Callable[[Path], list[Finding]]:
    return lambda _: [judge(*each) for each in given]


def of(name: str, *given: tuple[Any, ...]) -> Callable[[Path], list[Finding]]:
    """Return what a row of the table of GPUs says of readings."""
    return seen(partial(gpu_health.CHECKS[name].finding, name, name), *given)


# The first letters of the verdicts, in the order of what is looked at.
ROWS: dict[str, tuple[str, Callable[[Path], list[Finding]]]] = {
    "GPUs": ("fu", lambda _: [*of_gpu(True, nvmlInit=12), *of_gpu(nvmlInit=12)]),
    "GPU 0": (
        "fu",
        lambda _: [*of_gpu(nvmlDeviceGetName=15), *of_gpu(nvmlDeviceGetHandleByUUID=6)],
    ),
    "number of GPUs": ("f", lambda _: of_looks(look(0, uuids=["a"], gpus_given=2))),
    "same GPUs": (
        "ffwww",
        lambda _: [
            *of_gpus(name="X2"),
            *(found for links in (17, 0) for found in of_gpus(nvlinks=links)),
            *of_gpus(driver="580.1", memory_bytes=(80 << 30) - MIB),
            *of_gpus(power_w=350.0),
        ],
    ),
    "ECC": ("pfww", of("ECC", (3, 0), (0, 1), (20_000, 0), (None, None))),
    "retired memory": (
        "pwf",
        of("retired memory", *(("1 row", *each) for each in ((0, 0), (1, 0), (0, 1)))),
    ),
    "throttling": ("pfw", of("throttling", ([], []), (["heat"], []), ([], ["heat"]))),
    "other processes": (
        "pwf",
        of("other processes", *(({}, n * GIB, 80 * GIB) for n in (1, 9, 60))),
    ),
    "NUMA": ("w", of("NUMA", ("00000000:17:00.0",))),
    "rank 0: matmul_tflops": ("fwp", lambda _: [*of_speed(40), *of_speed(70), *of_speed(90)]),
    "link to other nodes": (
        "pppfpppwpppp",
        lambda _: [*of_link(400), *of_link(600), *of_link(900)],
    ),
    "InfiniBand library": ("w", lambda _: [network.infiniband_library()]),
    "locked memory (ulimit -l)": (
        "fwpp",
        seen(limits.locked_memory, (8 * MIB, True), (GIB, True), (8 * MIB, False), (-1, True)),
    ),
    "/dev/shm": (
        "fwpwp",
        seen(
            limits.shared_memory,
            *(
                (n * MIB, n * MIB, of)
                for n, of in ((20, 0), (48, 0), (512, 1), (512, 4), (1024, 4))
            ),
        ),
    ),
    "open files (ulimit -n)": (
        "fwp",
        seen(limits.open_files, *((n, n) for n in (500, 1000, 1024))),
    ),
    "CPU cores": ("fwp", seen(limits.cpus, *((n, n, 8) for n in (4, 7, 8)))),
    "host names": (
        "wf",
        lambda _: [*of_names("no.invalid", "localhost"), *of_names("localhost", "no.invalid")],
    ),
    "interface": (
        "f",
        lambda folder: [
            found
            for nccl in (True, False)
            for found in network.interface(None, nccl, {"NCCL_SOCKET_IFNAME": "ib0"}, folder)
        ],
    ),
    "output_dir": (
        "fwpwp",
        lambda _: [
            *(file_systems.free_space("output_dir", n * GIB, 100 * GIB) for n in (0, 5, 50)),
            *(file_systems.locks("output_dir", why) for why in ("it has none", "")),
        ],
    ),
    "scratch": ("fw", lambda folder: [*of_scratch(folder, "node"), *of_scratch(folder, "auto")]),
    "data.path": ("f", lambda folder: [file_systems.readable(folder / "none")]),
    "same torch": ("f", lambda _: of_looks(look(0), look(1), look(2, versions=OTHER))),
    "same system": ("w", lambda _: of_looks(look(0), look(1), look(2, versions=OTHER))),
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
    monkeypatch.setattr(network, "_LIBRARY", "libnone.so.1")
    if name == "NUMA":
        monkeypatch.setattr(gpu_health, "_DEVICES", tmp_path)
        (tmp_path / "0000:17:00.0").mkdir()
        (tmp_path / "0000:17:00.0" / "local_cpulist").write_text("4000\n")
    if name == "scratch":
        monkeypatch.setattr(file_systems, "_FAIL_FREE", 2**60)
    letters, look_at = ROWS[name]
    found = [one for one in look_at(tmp_path) if one.check.startswith(name)]
    assert "".join(one.result[0] for one in found) == letters, found
    assert {FAIL: "f" in letters, WARN: "w" in letters} == documented()[name]
    assert all(one.cure for one in found if one.result in (FAIL, WARN))
