"""Every metric stands in one list, and its command prints the list."""

import re
from pathlib import Path

import pytest

from hpctrain.config.metric_registry import registered
from hpctrain.errors import ConfigError
from hpctrain.insight.monitor.cgroup import JobCgroup
from hpctrain.insight.monitor.metric_names import METRICS
from hpctrain.insight.monitor.nvidia import Nvidia
from hpctrain.insight.monitor.sensors import Gpus, Sensors
from hpctrain.insight.reference.keys import show
from tests.monitor.nvml import Nvml


def test_each_metric_stands_once_with_a_meaning() -> None:
    names = [metric.name for metric in registered()]
    assert len(names) == len(set(names))
    assert all(re.fullmatch(r"[A-Z1].*\.", metric.text) for metric in registered())


def test_it_has_the_sensors_that_the_monitor_reads(tmp_path: Path) -> None:
    nvml = Nvml()
    gpus = Gpus(["GPU-a"], Nvidia(nvml))
    gpus.read()  # rates need a reading before
    sensors = Sensors(JobCgroup(1, tmp_path, tmp_path), Gpus([]))
    found = {re.sub(r"gpu_\d+", "gpu_N", name) for name in (*gpus.read(), *sensors.read())}
    known = {metric.name.removeprefix("system/NODE/") for metric in METRICS}
    assert found <= known
    # What this machine or the stand-in lacks.
    assert not {name for name in known - found if not re.match(r"gpu_N_ecc|cpu", name)}


def test_the_command_prints_a_group_or_a_metric(capsys: pytest.CaptureFixture[str]) -> None:
    show(["perf/gpu_hours", "best/"])
    lines = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
    assert [line[:2] for line in lines] == [
        ["perf/gpu_hours", "GPU h"],
        ["best/NAME", ""],
        ["best/step", "steps"],
    ]
    with pytest.raises(ConfigError, match=r"did you mean perf/step_ms_\w+\? at the top are best/,"):
        show(["perf/stap_ms"])
