"""Tests of the sensors of AMD's GPUs, with a stand-in for amdsmi: this machine has no GPU."""

import logging
from pathlib import Path

import pytest

from hpctrain.base.processes import gpu_driver
from hpctrain.insight.monitor.amd import Amd
from hpctrain.insight.monitor.gpus import Gpus
from tests.monitor.played_amdsmi import UUIDS, AmdSmi


def test_only_the_jobs_own_gpu_is_read() -> None:
    smi = AmdSmi()
    gpus = Gpus([UUIDS[1]], Amd(smi))
    assert gpus.facts == {"gpu_0": "AMD Instinct MI300X", "driver": "6.12.12"}
    found = gpus.read()
    assert smi.asked == {1}, "another job's GPU was read"
    assert found == {
        "gpu_0_memory_usage_megabytes": pytest.approx(51_535.4, rel=1e-4),
        "gpu_0_memory_usage_percentage": 25,
        "gpu_0_utilization_percentage": 93,
        "gpu_0_power_usage_watts": 600,
        "gpu_0_power_usage_percentage": 80,
        "gpu_0_energy_joules": 0,
        "gpu_0_temperature_celsius": 71,
        "gpu_0_clock_megahertz": 2100,
        "gpu_0_ecc_corrected_errors": 3,
        "gpu_0_ecc_uncorrected_errors": 0,
    }
    smi.energy += 10**6
    assert gpus.read()["gpu_0_energy_joules"] == pytest.approx(15.3)


def test_a_missing_sensor_costs_itself_alone(caplog: pytest.LogCaptureFixture) -> None:
    smi = AmdSmi()
    gpus = Gpus([*UUIDS, "0-1"], Amd(smi))
    assert "GPU 2 (0-1) is not measured" in caplog.text
    every = gpus.read()
    smi.broken = {"amdsmi_get_energy_count": 2, "amdsmi_get_gpu_activity": 7}
    with caplog.at_level(logging.WARNING):
        first, second = gpus.read(), gpus.read()
    gone = {n for n in every if "energy" in n or "utilization" in n}
    assert first.keys() == second.keys() == every.keys() - gone
    # What a GPU does not have is asked once; what has failed is asked again.
    assert sum("gpu_1 has no energy" in message for message in caplog.messages) == 1
    assert sum("gpu_1 has no use" in message for message in caplog.messages) == 2
    smi.broken = {}
    assert gpus.read().keys() == {n for n in every if "energy" not in n}


def test_a_library_that_is_not_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The kernel's driver is there (a stand-in), its package is not."""
    monkeypatch.setattr(gpu_driver, "_AMD", tmp_path)
    assert Gpus([UUIDS[0]]).read() == {}
    assert "GPUs are not measured: No module named 'amdsmi'" in caplog.text


def test_a_driver_that_does_not_answer(caplog: pytest.LogCaptureFixture) -> None:
    smi = AmdSmi()
    smi.broken = {"amdsmi_init": 34}
    assert Gpus([UUIDS[0]], Amd(smi)).read() == {}
    assert "GPUs are not measured: error 34" in caplog.text
