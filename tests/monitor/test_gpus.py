"""Tests of the GPU sensors, with a stand-in for NVML: this machine has no GPU."""

import logging

import pytest

from hpctrain.insight.doctor.checks.gpu_health import CHECKS
from hpctrain.insight.monitor import sensors
from hpctrain.insight.monitor.nvidia import Nvidia
from hpctrain.insight.monitor.sensors import Gpus
from tests.monitor.nvml import Nvml


def test_all_rows_speak_of_readings_that_there_are() -> None:
    rows = [*sensors._SENSORS.values(), *CHECKS.values()]
    assert {reading for reading, *_ in rows} < Nvidia(Nvml()).readings.keys()


def test_only_the_jobs_own_gpus_are_read_by_name() -> None:
    nvml = Nvml()
    gpus = Gpus(["a"], Nvidia(nvml))  # torch writes a UUID without its kind
    found = gpus.read()
    assert nvml.asked == {"GPU-a"}, "another job's GPU was read"
    assert gpus.facts == {"driver": "580.105.08", "gpu_0": "NVIDIA H100 80GB HBM3"}
    assert found["gpu_0_utilization_percentage"] == 87
    assert found["gpu_0_memory_usage_megabytes"] == 20_000
    assert found["gpu_0_memory_usage_percentage"] == 25
    assert found["gpu_0_power_usage_watts"] == 350
    assert found["gpu_0_power_usage_percentage"] == 50
    assert found["gpu_0_temperature_celsius"] == 61


def test_a_counter_becomes_energy() -> None:
    nvml = Nvml()
    gpus = Gpus(["GPU-a"], Nvidia(nvml))
    assert gpus.read()["gpu_0_energy_joules"] == 0
    nvml.energy += 7_000_000
    found = gpus.read()
    assert found["gpu_0_energy_joules"] == 7_000
    nvml.energy = 5  # the driver was loaded anew
    assert gpus.read()["gpu_0_energy_joules"] == 0


@pytest.mark.parametrize(
    ("reasons", "heat", "power"), [(0x01, 0, 0), (0x04, 0, 1), (0x20, 1, 0), (0x40 | 0x80, 1, 1)]
)
def test_throttling_is_told_from_idling(reasons: int, heat: int, power: int) -> None:
    nvml = Nvml()
    nvml.reasons = reasons
    found = Gpus(["GPU-a"], Nvidia(nvml)).read()
    assert (found["gpu_0_throttled_by_heat"], found["gpu_0_throttled_by_power"]) == (heat, power)


def test_a_mig_instance_has_only_its_own_memory() -> None:
    gpus = Gpus(["MIG-c"], Nvidia(Nvml()))
    assert sorted(gpus.read()) == ["gpu_0_memory_usage_megabytes", "gpu_0_memory_usage_percentage"]


def test_a_missing_sensor_is_asked_once_and_costs_itself_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    gpus = Gpus(["GPU-a"], Nvidia(Nvml()))
    with caplog.at_level(logging.WARNING):
        first, second = gpus.read(), gpus.read()
    assert not any("ecc" in name for name in first)
    assert first.keys() <= second.keys()
    assert sum("no ECC" in message for message in caplog.messages) == 1


def test_a_lost_gpu_leaves_the_others() -> None:
    nvml = Nvml()
    gpus = Gpus(["GPU-a", "GPU-b"], Nvidia(nvml))
    nvml.lost = {"GPU-a"}
    found = gpus.read()
    assert {name[:5] for name in found} == {"gpu_1"}
    nvml.lost = set()
    assert {name[:5] for name in gpus.read()} == {"gpu_0", "gpu_1"}


def test_an_unknown_gpu_is_said_and_left_out(caplog: pytest.LogCaptureFixture) -> None:
    assert {name[:5] for name in Gpus(["x", "b"], Nvidia(Nvml())).read()} == {"gpu_1"}
    assert "GPU 0 (x) is not measured" in caplog.text
