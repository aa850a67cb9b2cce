"""Tests of `hpctrain status --live`; GPUs are played by the stand-in for NVML."""

import fcntl
import json
import os
import pty
import re
import struct
import sys
import termios
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from hpctrain.config.frozen import dump
from hpctrain.config.schema import Config
from hpctrain.console import Console
from hpctrain.disk import write_atomically
from hpctrain.errors import ConfigError, StorageError
from hpctrain.monitor.gpus import Gpus
from hpctrain.monitor.nvidia import Nvidia
from hpctrain.report.live.live import main, picture
from hpctrain.report.live.snapshot import snapshot
from hpctrain.runs.run_dir import RunDir
from hpctrain.tracking import samples
from tests.conftest import Completed, runs
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
        "steps_per_s": 10.0,
        "metric": "val/accuracy",
        "metrics": {"val/accuracy": 0.97, "train/loss": 0.1, "perf/slowest_rank": 3.0},
    }
    (path / "progress.json").write_text(json.dumps(progress))
    return RunDir(path)


def sampled(run: RunDir, node: str, nvml: Nvml | None, at: float = NOW, **own: float) -> None:
    """Write ten samples of a node, the last one at the time `at`."""
    gpus = Gpus([] if nvml is None else ["GPU-a", "GPU-b"], Nvidia(nvml))
    writer = samples.Writer(samples.folder(run.path) / f"{node}.jsonl")
    writer.write(at - 100, facts=gpus.facts)
    for number in range(10):
        writer.write(at - 10 * (9 - number), metrics=CORES | own | gpus.read())
    writer.close()


def shown(run: RunDir) -> list[str]:
    console = Console(width=80)
    with console.capture() as capture:
        console.print(picture(snapshot(run, NOW + 1)))
    return capture.get().splitlines()


class Slower(Nvml):
    """GPUs of which the second has a low clock."""

    def nvmlDeviceGetClockInfo(self, handle: str, _: int) -> int:
        return 900 if handle == "GPU-b" else 1755


def test_nodes_and_gpus_fit_into_80_columns_and_slow_ones_come_first(tmp_path: Path) -> None:
    run = made(tmp_path, ["n01", "n02-with-a-very-long-name.cluster"])
    sampled(run, "n01", Nvml())
    sampled(run, "n02-with-a-very-long-name.cluster", Slower())
    lines = shown(run)
    assert max(map(len, lines)) <= 80
    text = " ".join(" ".join(lines).split())
    assert "running step 1200/5000 val/accuracy 0.97" in text
    assert "slowest: rank 3 on" in text
    assert "slow: gpu 1 has 900 MHz, the median is 1755 MHz" in text
    rows = [line.split() for line in lines if "cores" in line or "gpu 0" in line]
    assert rows[0][:3] == ["n02-wit..cluster", "cores", "40%"]
    assert rows[0][-1] == "31%"
    assert rows[1] == ["gpu", "0", "87%", "▇" * 10, "25%", "350", "W", "61", "°C"]


def test_a_silent_node_and_a_note_on_the_run_are_shown(tmp_path: Path) -> None:
    run = made(tmp_path, ["n01", "n02", "n03"])
    note = {"topic": "slow_rank", "text": "rank 1 (n01) is slow", "step": 900, "about": "1"}
    run.update(notes=[note])
    for node in ("n01", "n02"):
        sampled(run, node, None)
    sampled(run, "n03", None, at=NOW - 60)
    seen = snapshot(run, NOW + 1)
    assert [node.name for node in seen.nodes if node.notes] == ["n03"]
    assert seen.nodes[0].notes[0].startswith("silent: no sample for 61 s")
    assert any("* rank 1 (n01) is slow" in line for line in shown(run))
    assert seen.facts()["notes"] == ["rank 1 (n01) is slow"]


def test_a_run_whose_process_is_gone_has_no_forecast(tmp_path: Path) -> None:
    run = made(tmp_path, ["n01"])
    assert "ETA" in "".join(shown(run))
    seen = snapshot(run, NOW + 3600)
    assert seen.progress.left_s is None
    assert seen.notes[0].startswith("no sign of life for 36")
    assert seen.state == "lost"  # one word for `status` and `top`
    with run.lock():
        assert snapshot(run, NOW + 3600).state == "running"


def test_throttling_idleness_and_what_is_over(tmp_path: Path) -> None:
    run = made(tmp_path, ["n01", "n02"])
    hot = Nvml()
    hot.reasons = 0x20
    sampled(run, "n01", hot)
    sampled(run, "n00", None, at=NOW - 700)  # of an attempt before
    idle = run.path / "monitor" / "n01.idle"
    idle.write_text("n01: gpu_1 below 5% for 30 minutes\n")
    os.utime(idle, (NOW, NOW))
    (node,) = snapshot(run, NOW + 1).nodes
    assert node.notes == [
        "slow: gpu 0 is too hot, its clock is lowered",
        "slow: gpu 1 is too hot, its clock is lowered",
        "idle: n01: gpu_1 below 5% for 30 minutes",
    ]
    assert any("61 hot" in line for line in shown(run))


def test_the_command_and_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = made(tmp_path, ["n01"], state="finished")
    sampled(run, "n01", Nvml())
    assert main(["--once", "--dir", str(tmp_path), run.path.name[:8]]) == 0
    told = capsys.readouterr().out
    assert told.startswith(f"{run.path.name}\n")
    assert "finished  step 1200/5000" in told
    with pytest.raises(ConfigError, match=r"nope: no run or sweep of that name"):
        main(["nope", "--dir", str(tmp_path)])
    with pytest.raises(StorageError, match=r"no folder of runs"):
        main(["--dir", str(tmp_path / "nowhere")])
    with pytest.raises(SystemExit):
        main(["--every", "0"])
    assert "0 is not a number of seconds from 0.2 to 3600" in capsys.readouterr().err


class Terminal:
    """The program on a terminal of 80 columns, and what it has written there.

    Args:
        arguments: Those of `top`.
    """

    def __init__(self, *arguments: str) -> None:
        self.text = ""
        pid, self._end = pty.fork()
        if pid == 0:
            command = [sys.executable, "-m", "hpctrain", "status", "--live", *arguments]
            os.execve(sys.executable, command, os.environ | {"TERM": "xterm-256color"})
        self.pid = pid
        size = struct.pack("HHHH", 30, 80, 0, 0)
        fcntl.ioctl(self._end, termios.TIOCSWINSZ, size)

    def read_until(self, word: str) -> str:
        """Read until it has written `word` anew; return what it has written since then."""
        begin, text = len(self.text), ""
        while word not in text:
            try:
                part = os.read(self._end, 65536)
            except OSError:  # it has ended
                part = b""
            assert part, self.text
            self.text += part.decode(errors="replace")
            text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", self.text[begin:])
        return text

    def type(self, key: bytes) -> None:
        os.write(self._end, key)

    def code(self) -> int:
        """Return the exit code, after reading the rest."""
        with suppress(OSError):
            while part := os.read(self._end, 65536):
                self.text += part.decode(errors="replace")
        os.close(self._end)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


@pytest.mark.slow
@pytest.mark.parametrize("how", ["Ctrl-C", "the run ends"])
def test_live_on_a_terminal(how: str, tmp_path: Path) -> None:
    """It shows a new sample, and a node that no longer answers; then it gives the terminal back."""
    now = time.time()
    run = made(tmp_path, ["n01", "n02"], now=now)
    for node in ("n01", "n02"):
        sampled(run, node, Nvml(), at=now)
    terminal = Terminal("--every", "0.2", "--dir", str(tmp_path))
    first = terminal.read_until("gpu 1")
    assert "silent" not in first
    lines = first.replace("\r", "").split("\n")
    assert max(map(len, lines)) <= 80, lines
    # A minute later n02 has written nothing, and the others go on.
    sampled_later = samples.folder(run.path) / "n02.jsonl"
    text = sampled_later.read_text()
    for line in text.splitlines():
        facts = json.loads(line)
        text = text.replace(line, json.dumps(facts | {"time": facts["time"] - 60}))
    write_atomically(sampled_later, text)
    assert "n02" in terminal.read_until("silent: no sample for")
    if how == "Ctrl-C":
        terminal.type(b"\x03")
    else:
        record = json.loads((run.path / "run.json").read_text())
        write_atomically(run.path / "run.json", json.dumps(record | {"state": "finished"}))
    assert terminal.code() == 0
    assert "Traceback" not in terminal.text
    assert terminal.text.rindex("\x1b[?25h") > terminal.text.rindex("\x1b[?25l")  # the cursor


@pytest.mark.slow
def test_a_real_run(
    train: Callable[..., Completed], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train("train.max_steps=30", "tracking.upload=false", "monitor.every_s=0.2")
    folder = tmp_path / "runs"
    (run,) = runs(folder)
    began = time.time()
    assert main(["--json", "--dir", str(folder)]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert (found["run"], found["state"], found["step"]) == (str(run), "finished", 30)
    ((node,), seconds) = found["nodes"], time.time() - began
    assert node["metrics"]["system_memory_usage_percentage"] > 0
    assert node["age_s"] >= seconds
    assert node["notes"] == node["gpus"] == []
