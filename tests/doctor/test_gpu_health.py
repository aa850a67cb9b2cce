"""Tests of the health of GPUs: each planted fault is found, and a healthy GPU has none.

There is no GPU here: NVML is the stand-in of tests/monitor.
"""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hpctrain.base.processes import gpu_driver
from hpctrain.insight.doctor import comparison
from hpctrain.insight.doctor.checks import gpu_health
from hpctrain.insight.doctor.finding import Finding
from hpctrain.insight.doctor.probe import Probe
from hpctrain.insight.monitor.nvidia import Nvidia
from tests.monitor.nvml import KINDS, Nvml, Player, load

GPU = "GPU-a"


def findings(library: Nvidia, gpu: str = "") -> list[Finding]:
    return gpu_health.checked([gpu or GPU], library=library)[1]


def found(library: Nvidia, *verdicts: str, gpu: str = "") -> dict[str, str]:
    """Return the checks of one GPU with these verdicts, by default those that have not passed."""
    seen, wanted = findings(library, gpu), verdicts or ("warn", "fail")
    assert all(one.cure for one in seen if one.result in ("warn", "fail"))
    return {one.check.removeprefix("GPU 0: "): one.result for one in seen if one.result in wanted}


def nvidia(**planted: Any) -> Nvidia:
    nvml = Nvml()
    healthy = {"ecc": (3, 0), "used": 600_000_000}  # the driver's own memory
    vars(nvml).update(healthy | planted)
    return Nvidia(nvml)


@pytest.mark.parametrize(
    ("library", "expected"),
    [
        (nvidia(), {}),
        (nvidia(ecc=(0, 2)), {"ECC": "fail"}),
        (nvidia(remapped=[8, 9, 0, 1]), {"retired memory": "fail"}),
        (nvidia(reasons=0x40), {"throttling": "fail"}),
        (nvidia(reasons=0x01), {}),  # nothing runs
        (nvidia(used=60_000_000_000, c2c=1), {}),  # Linux keeps pages of what has ended there
        (nvidia(ecc_modes=(0, 1)), {"ECC": "warn"}),
        (nvidia(ecc_modes=(0, 0)), {}),  # a card for workstations, as it is delivered
        (nvidia(broken={"nvmlDeviceGetMemoryInfo": 3}), {}),  # its memory is that of the host
        (nvidia(broken={"nvmlDeviceGetName": 999}), {"GPU 0": "fail"}),
        (nvidia(nvlinks=[1] * 12 + [0] * 6), {}),  # a PCIe board of the H100, by design
        (nvidia(nvlinks=[]), {}),
        # Nobody is seen who uses the memory: a process of another container, or one that has died.
        (nvidia(used=60_000_000_000), {"other processes": "fail"}),
        (nvidia(lost={GPU}), {"GPU 0": "fail"}),
    ],
)
def test_a_gpu(library: Nvidia, expected: dict[str, str]) -> None:
    assert found(library) == expected
    # The kernel does not know the PCI address of a GPU that is not there, and says so.
    assert "GPU 0" in expected or "NUMA" in found(library, "unknown")


_MANY = [*range(64)]  # pages: more cannot be retired
# What is planted, and the row that fails; T4 are from before Ampere.
_PLANTED: list[tuple[str, Any, str, str]] = [
    ("nvmlDeviceGetTotalEccErrors(gpu, 1, 0)", 2, "ECC", "all"),
    ("nvmlDeviceGetRemappedRows", [8, 9, 0, 1], "retired memory", "all"),
    ("nvmlDeviceGetRetiredPages(gpu, 1)", _MANY, "retired memory", "t4"),
    ("nvmlDeviceGetCurrentClocksEventReasons", 0x40, "throttling", "all"),
]


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_gpu(kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Every row has its verdict on the GPUs of tests/corpus/nvml, well and with planted faults."""
    answers = load(f"{kind}.yaml")["answers"]
    address = answers["nvmlDeviceGetPciInfo"]["busId"].lower()[4:]  # as the kernel writes it
    (tmp_path / address).mkdir()
    (tmp_path / address / "local_cpulist").write_text("0-1023\n")
    monkeypatch.setattr(gpu_health, "_DEVICES", tmp_path)

    def of(**planted: Any) -> dict[str, str]:
        library = Nvidia(Player(answers | planted))
        return found(library, "pass", "warn", "fail", "unknown")

    well = dict.fromkeys(gpu_health.CHECKS, "pass")
    assert of() == well
    for call, answer, row, kinds in _PLANTED:
        if kinds in ("all", kind):
            assert of(**{call: answer}) == well | {row: "fail"}
    waits = {"nvmlDeviceGetRetiredPagesPendingStatus": 1}
    assert of(**waits) == well | ({"retired memory": "warn"} if kind == "t4" else {})
    size = answers["nvmlDeviceGetMemoryInfo"]["total"]
    full = {"nvmlDeviceGetMemoryInfo": {"total": size, "used": size}}
    # Of a GPU whose memory Linux fills with pages of files only what processes have counts.
    assert of(**full) == well | ({} if kind == "gb200" else {"other processes": "fail"})
    off = {"nvmlDeviceGetEccMode": [0, 0]}
    assert of(**off) == well | {"ECC": "warn"}
    # A card for games has none of these.
    lacks = "nvmlDeviceGetEccMode", "nvmlDeviceGetRemappedRows", "nvmlDeviceGetRetiredPages"
    gone = {name: {"error": 3} for name in lacks}
    assert of(**gone) == well | {"ECC": "unknown", "retired memory": "unknown"}
    lost = {"nvmlDeviceGetName": {"error": 15}}
    assert of(**lost) == {"GPU 0": "fail"}


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
        return {one.result: one.found for one in findings(Nvidia(nvml)) if one.check == check}

    nvml.processes, nvml.used = [os.getpid()], 2**30 + 600_000_000
    assert found() == {"pass": "none"}
    monkeypatch.setattr(os, "getuid", lambda: 12345)  # now this process is another user's
    used = f"1.7 GB of 80.0 GB are in use, by processes {os.getpid()} of user "
    assert found() == {"warn": f"{used}{os.stat('/proc/self').st_uid}"}
    nvml.processes = [2**22 + 1]  # in another container
    assert [*found()] == ["unknown"]
    monkeypatch.undo()
    with sleeping(SLURM_JOB_ID="7") as earlier:
        nvml.processes, nvml.used = [earlier], 60_000_000_000
        assert "another job of yours" in found()["fail"]
        nvml.processes = [os.getpid()]
        assert [*found()] == ["fail"]  # what it has is its own, the rest is nobody's


def test_gpus_of_amd_are_unknown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The kernel's driver is there (a stand-in): NVML, which NCCL needs elsewhere, is not asked."""
    monkeypatch.setattr(gpu_driver, "_AMD", tmp_path)
    facts, (said,) = gpu_health.checked([GPU], nccl=True)
    assert (facts, said.result) == ([], "unknown")
    assert "AMD's" in said.found


def test_what_nvml_does_not_tell_is_said() -> None:
    """A GPU for games has no ECC, and a MIG instance has no health of its own."""
    assert "ECC" in found(nvidia(ecc=None), "unknown")
    assert [one.result for one in findings(nvidia(), "MIG-c")] == ["unknown"]
    assert found(nvidia(), "unknown", gpu="GPU-x") == {"GPU 0": "unknown"}
    assert gpu_health.checked(["GPU-x"], library=nvidia())[0] == []
    lost = nvidia(broken={"nvmlDeviceGetHandleByUUID": 15})  # torch writes no "GPU-"
    assert found(lost, gpu="a") == {"GPU 0": "fail"}
    (facts,), _ = gpu_health.checked([GPU], library=nvidia(broken={"nvmlDeviceGetMemoryInfo": 3}))
    assert (facts.name, facts.memory_bytes) == ("NVIDIA H100 80GB HBM3", None)


def test_a_library_that_does_not_answer_stops_only_nccl() -> None:
    """Torch sees the GPUs; without NVML, such as in a container for computing only, NCCL ends."""
    silent = nvidia(broken={"nvmlInit": 12})
    assert found(silent, "unknown") == {"GPUs": "unknown"}
    (said,) = gpu_health.checked([GPU], library=silent, nccl=True)[1]
    assert (said.result, "NCCL needs it" in said.found) == ("fail", True)


def test_the_dies_of_a_board_of_amd_are_told_apart_by_their_addresses() -> None:
    """The two of an MI250X have one serial number, which torch writes as UUID@address."""
    looks = [Probe("node0", n, n, {}, [], [], peers=2, gpus_given=2) for n in (0, 1)]
    looks = [replace(each, uuids=[f"serial@0000:0{each.rank}:00"]) for each in looks]
    assert [one.result for one in comparison.compared(looks)["node0"]] == ["pass"]


def test_the_ranks_wait_until_the_step_before_has_left_their_gpus(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    library, naps = nvidia(used=40_000_000_000), list[float]()

    def sleep(seconds: float) -> None:
        naps.append(seconds)
        library.module.used -= 20_000_000_000 - 150_000_000

    monkeypatch.setattr(gpu_health.time, "sleep", sleep)
    assert gpu_health.wait_until_free([GPU], library=library) == []
    assert len(naps) == 2  # what is left is the driver's own
    library.module.used = 40_000_000_000
    left = gpu_health.wait_until_free([GPU], wait_s=-1, library=library)
    assert left == ["40.0 GB of 80.0 GB of GPU GPU-a are in use"]
    assert gpu_health.wait_until_free(["GPU-none"], library=library) == []  # nobody tells
    assert gpu_health.wait_until_free([]) == []
