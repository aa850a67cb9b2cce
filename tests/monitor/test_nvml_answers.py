"""What NVML answers on GPUs of many kinds is read as tests/corpus/nvml says (see its README).

Recordings of real GPUs (`make gpu`) are read as they were then, and the other files as they were
written by hand.
"""

import ctypes
import json
import logging
from typing import Any

import pynvml
import pytest

from hpctrain.insight.monitor.nvidia import Nvidia
from hpctrain.insight.monitor.sensors import Gpus
from tests.gpu.nvml_answers import readings, recorded
from tests.monitor.nvml import FOLDER, KINDS, Player, load

FILES = sorted(file.name for file in FOLDER.iterdir() if file.suffix != ".md")


def test_the_kinds_are_there() -> None:
    assert KINDS == ["a100", "b200", "gb200", "h100", "l40s", "t4"]


@pytest.mark.parametrize("name", FILES)
def test_a_file_gives_its_readings(name: str) -> None:
    file = load(name)
    now = readings(Nvidia(Player(file["answers"])), "gpu")
    assert now | ({} if file["readings"]["processes"] else {"processes": None}) == file["readings"]
    assert all(hasattr(pynvml, call.partition("(")[0]) for call in file["answers"])


def test_all_links_count() -> None:
    """NVML has room for more than 18; the links of a board may end, or not be told, in between."""
    states = [1, 0, {"error": 3}, *[1] * 33]
    links = {f"nvmlDeviceGetNvLinkState(gpu, {n})": state for n, state in enumerate(states)}
    library = Nvidia(Player(links))
    assert library.read("nvlinks", "gpu") == (34 - (36 - pynvml.NVML_NVLINK_MAX_LINKS),)


class OfC(Player):
    """Some answers are objects of C, as those of pynvml are."""

    def answer(self, name: str, arguments: tuple[Any, ...]) -> Any:
        found = super().answer(name, arguments)
        match name:
            case "nvmlDeviceGetHandleByUUID":
                return pynvml.c_nvmlDevice_t()
            case "nvmlDeviceIsMigDeviceHandle":
                return ctypes.c_uint(found)
            case "nvmlDeviceGetMemoryInfo":
                return pynvml.c_nvmlMemory_t(**found)
        return found


def test_a_recording_plays_what_was_answered() -> None:
    given = load("h100.yaml")
    file = json.loads(json.dumps(recorded(OfC(given["answers"]), "GPU-a")))
    now = readings(Nvidia(Player(file["answers"])), "gpu")
    assert now | {"processes": None} == file["readings"] == given["readings"] | {"processes": None}


_USED = {  # percent of the memory, that the driver has
    "a100": 1.262,
    "b200": 0.396,
    "gb200": 0.391,
    "h100": 0.587,
    "l40s": 1.320,
    "t4": 2.910,
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_monitor_has_all_sensors_of_each_kind(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    file = load(f"{kind}.yaml")
    read, gpus = file["readings"], Gpus(["GPU-a"], Nvidia(Player(file["answers"])))
    assert gpus.facts == {"driver": read["driver"][0], "gpu_0": read["model"][0]}
    with caplog.at_level(logging.WARNING):
        found = {name.removeprefix("gpu_0_"): value for name, value in gpus.read().items()}
    assert not caplog.messages
    watts, limit = read["power"]
    assert found == {
        "memory_usage_megabytes": read["memory"][0] / 1e6,
        "memory_usage_percentage": pytest.approx(_USED[kind], abs=0.001),
        "utilization_percentage": 0,
        "power_usage_watts": watts,
        "power_usage_percentage": 100 * watts / limit,
        "energy_joules": 0,  # since the first reading
        "temperature_celsius": read["heat"][0],
        "clock_megahertz": read["clock"][0],
        "throttled_by_heat": 0,
        "throttled_by_power": 0,
        "ecc_corrected_errors": 0,
        "ecc_uncorrected_errors": 0,
    }
