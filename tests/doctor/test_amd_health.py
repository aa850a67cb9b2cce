"""Tests of the health of AMD's GPUs, with a stand-in for amdsmi: this machine has no GPU."""

import os
from typing import Any

import pytest

from hpctrain.doctor.checks import gpu_health
from hpctrain.doctor.checks.gpu_health import GpuFacts
from hpctrain.doctor.finding import Finding
from hpctrain.hardware import of_device
from hpctrain.monitor import amd
from tests.monitor.played_amdsmi import UUIDS, AmdSmi


def found_of(smi: AmdSmi, verdicts: tuple[str, ...] = ("warn", "fail")) -> dict[str, str]:
    _, findings = gpu_health.checked([UUIDS[1]], library=amd.Amd(smi))
    assert all(one.cure for one in findings if one.verdict in ("warn", "fail"))
    return {one.check.removeprefix("GPU 0: "): one.verdict for one in findings if of(one, verdicts)}


def of(finding: Finding, verdicts: tuple[str, ...]) -> bool:
    return finding.verdict in verdicts


@pytest.mark.parametrize(
    ("planted", "expected"),
    [
        ({}, {}),
        ({"ecc": (0, 2)}, {"ECC": "fail"}),
        ({"ecc": (20_000, 0)}, {"ECC": "warn"}),
        ({"pages": [0, 0]}, {}),  # pages that are set aside do no harm
        ({"pages": [0, 1]}, {"retired memory": "warn"}),
        ({"pages": [2]}, {"retired memory": "fail"}),
        ({"active": {"active_prochot_thrm": True}}, {"throttling": "fail"}),
        ({"active": {"active_hbm_thrm": True}}, {"throttling": "warn"}),
        ({"active": {"active_ppt_pwr": True}}, {}),  # the power limit is reached under load
        ({"celsius": 93}, {"temperature": "warn"}),
        ({"celsius": 104}, {"temperature": "fail"}),
        ({"used_mib": 49_148}, {"other processes": "warn"}),
        ({"watts": 400}, {"power limit": "warn"}),
        ({"link": (2.5, 16)}, {}),  # at rest
        ({"link": (32.0, 4)}, {"PCIe": "fail"}),
    ],
)
def test_an_amd_gpu(planted: dict[str, Any], expected: dict[str, str]) -> None:
    smi = AmdSmi()
    vars(smi).update({"used_mib": 300} | planted)
    assert found_of(smi) == expected


def test_its_facts_are_those_of_its_file() -> None:
    (facts,), _ = gpu_health.checked([UUIDS[1]], library=amd.Amd(AmdSmi()))
    name, memory = "AMD Instinct MI300X", 196_592 * 2**20
    assert facts == GpuFacts(name, "6.12.12", memory, 2100, 750.0, pytest.approx(63, rel=0.01))
    hardware = of_device(facts.name, facts.memory_bytes)
    assert hardware is not None
    assert hardware.name == "mi300x"


def test_processes_of_other_users_on_an_amd_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    smi = AmdSmi()
    smi.processes, smi.used_mib = {os.getpid(): 2**30}, 1324
    assert found_of(smi) == {}
    monkeypatch.setattr(os, "getuid", lambda: 12345)  # now this process is another user's
    assert found_of(smi) == {"other processes": "warn"}
    smi.processes, smi.used_mib = {os.getpid(): 0}, 300  # it only has the driver open
    assert found_of(smi) == {}


def test_what_amdsmi_does_not_tell_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each function that fails costs its own check alone; a GPU that is gone fails."""
    smi = AmdSmi()
    assert found_of(smi, ("unknown",)) == {"NUMA": "unknown", "Infinity Fabric": "unknown"}
    smi.active = dict.fromkeys(("active_prochot_thrm", "active_socket_thrm"), "N/A")
    smi.active |= dict.fromkeys(("active_vr_thrm", "active_hbm_thrm"), "N/A")
    smi.broken = {"amdsmi_get_gpu_total_ecc_count": 2, "amdsmi_get_gpu_process_list": 10}
    assert found_of(smi, ("unknown", "fail")).keys() == {
        *("NUMA", "Infinity Fabric", "throttling", "ECC", "other processes")
    }
    gone = "ffffffff-ffff-ffff-ffff-ffffffffffff"
    facts, (lost,) = gpu_health.checked([gone], library=amd.Amd(AmdSmi()), first=5)
    assert (facts, lost.check, lost.verdict) == ([], "GPU 5", "fail")
    smi.broken = {"amdsmi_init": 34}
    assert found_of(smi) == {"GPUs": "fail"}
    monkeypatch.setattr(amd, "is_here", lambda: True)  # a package without ROCm's library
    facts, (found,) = gpu_health.checked([UUIDS[0]])
    assert (facts, found.verdict) == ([], "unknown")
