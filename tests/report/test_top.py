"""Tests of `hpctrain status --live`; GPUs are played by the stand-in for NVML."""

import io
import json
import os
import time
from pathlib import Path

import pytest

from hpctrain.base.terminal.console import Console
from hpctrain.config.frozen import dump
from hpctrain.config.schema import Config
from hpctrain.errors import ConfigError, StorageError
from hpctrain.insight.monitor.nvidia import Nvidia
from hpctrain.insight.monitor.sensors import Gpus
from hpctrain.insight.report import live
from hpctrain.insight.report.live import main, picture, snapshot
from hpctrain.runs.run_dir import RunDir
from hpctrain.tracking import samples
from tests.monitor.nvml import Nvml

NOW = 1_800_000_000.0
CORES = {"cpu_utilization_percentage": 40.0, "system_memory_usage_percentage": 31.0}


def made(folder: Path, hosts: list[str], state: str = "running", now: float = NOW) -> RunDir:
    """Return a run on these hosts that has reported at the time `now`."""
    path = folder / "digits-01234567"
    (path / "monitor").mkdir(parents=True)
    attempt = {"started": now - 600, "hosts": hosts, "world_size": 2 * len(hosts)}
    frozen = {"signature": "s", "data_digest": "d", "state": state, "attempts": [attempt]}
    (path / "run.json").write_text(json.dumps(frozen))
    config = Config(model={"_target_": "hpctrain.models.MLP"})
    config.data.path, config.monitor.every_s = "data", 10.0
    (path / "config.yaml").write_text(dump(config))
    progress = {
        "step": 1200,
        "max_steps": 5000,
        "time": now,
        "stepped": now,
        "steps_per_s": 10.0,
        "metric": "val/accuracy",
        "metrics": {"val/accuracy": 0.97, "train/loss": 0.1},
    }
    (path / "progress.json").write_text(json.dumps(progress))
    return RunDir(path)


def sampled(run: RunDir, node: str, nvml: Nvml | None, at: float = NOW, **own: float) -> None:
    """Write ten samples of a node, the last one at the time `at`."""
    gpus = Gpus([] if nvml is None else ["GPU-a", "GPU-b"], Nvidia(nvml))
    writer = samples.SampleWriter(samples.folder(run.path) / f"{node}.jsonl")
    writer.write(at - 100, facts=gpus.facts)
    for number in range(10):
        writer.write(at - 10 * (9 - number), metrics=CORES | own | gpus.read())
    writer.close()


def shown(run: RunDir) -> list[str]:
    console = Console(width=80)
    with console.capture() as capture:
        console.print(picture(snapshot(run.path, NOW + 1)))
    return capture.get().splitlines()


def test_what_is_wrong_with_a_node_and_with_the_run(tmp_path: Path) -> None:
    run = made(tmp_path, ["n01", "n02", "n03"])
    note = {"topic": "slow_rank", "text": "rank 1 (n01) is slow", "step": 900, "about": "1"}
    run.update(notes=[note])
    hot = Nvml()
    hot.reasons = 0x20
    sampled(run, "n00", None, at=NOW - 700)  # of an attempt before
    sampled(run, "n01", hot)
    sampled(run, "n02", None)
    sampled(run, "n03", None, at=NOW - 60)
    idle = run.path / "monitor" / "n01.idle"
    idle.write_text("n01: gpu_1 below 5% for 30 minutes\n")
    os.utime(idle, (NOW, NOW))
    seen = snapshot(run.path, NOW + 1)
    assert {node.name: node.notes for node in seen.nodes} == {
        "n01": [
            "slow: gpu_0 is too hot, its clock is lowered",
            "slow: gpu_1 is too hot, its clock is lowered",
            "idle: n01: gpu_1 below 5% for 30 minutes",
        ],
        "n03": ["silent: no sample for 61 s"],
        "n02": [],
    }
    assert [node.name for node in seen.nodes] == ["n01", "n03", "n02"]
    assert seen.state.reason == "rank 1 (n01) is slow"
    assert any("* rank 1 (n01) is slow" in line for line in shown(run))


def test_a_run_whose_process_is_gone_has_no_forecast(tmp_path: Path) -> None:
    run = made(tmp_path, ["n01"])
    assert "ETA" in "".join(shown(run))
    seen = snapshot(run.path, NOW + 3600)
    assert seen.eta_s is None
    assert seen.state.name == "lost"  # as for `status`
    with run.lock():
        assert snapshot(run.path, NOW + 3600).state.name == "running"


def test_the_command_and_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = made(tmp_path, ["n01"], state="finished", now=time.time())
    sampled(run, "n01", Nvml(), at=time.time())
    assert main(["--once", "--dir", str(tmp_path), run.path.name[:8]]) == 0
    told = capsys.readouterr().out
    assert told.startswith(f"{run.path.name}\n")
    assert "finished  step 1200/5000" in told
    assert main(["--json", "--dir", str(tmp_path)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["run"], found["state"], found["step"]) == (str(run.path), "finished", 1200)
    (node,) = found["nodes"]
    assert node["metrics"]["system_memory_usage_percentage"] == 31
    assert node["metrics"]["gpu_1_temperature_celsius"] == 61
    with pytest.raises(ConfigError, match=r"nope: no run or sweep of that name"):
        main(["nope", "--dir", str(tmp_path)])
    with pytest.raises(StorageError, match=r"no folder of runs"):
        main(["--dir", str(tmp_path / "nowhere")])


@pytest.mark.parametrize("how", ["Ctrl-C", "the run ends"])
def test_live_on_a_terminal(how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It shows a new sample; then it ends, and gives the terminal back."""
    run, out, naps = made(tmp_path, ["n01"], now=time.time()), io.StringIO(), []
    console = Console(force_terminal=True, width=80, height=40)
    console.file = out
    monkeypatch.setattr(live, "Console", lambda: console)

    def sleep(seconds: float) -> None:
        naps.append(seconds)
        if len(naps) == 1:
            assert "no samples yet" in out.getvalue()
            sampled(run, "n01", Nvml(), at=time.time())
        elif how == "Ctrl-C":
            raise KeyboardInterrupt
        else:
            record = json.loads((run.path / "run.json").read_text())
            (run.path / "run.json").write_text(json.dumps(record | {"state": "finished"}))

    monkeypatch.setattr(live.time, "sleep", sleep)
    assert main(["--dir", str(tmp_path)]) == 0
    assert naps == [2.0, 2.0]
    text = out.getvalue()
    assert "gpu_1" in text
    assert ("finished" in text) == (how != "Ctrl-C")
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")  # the cursor
