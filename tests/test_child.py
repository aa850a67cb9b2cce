"""A process beside this one: it tells, ends with its input, comes back if it was killed."""

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from hpctrain.base.processes import child
from hpctrain.base.processes.child import Child, run_module

PROGRAM = "import os, sys; os.close(1); sys.stdin.read(); os._exit(7)"


def runs(code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    command = [sys.executable, "-c", code], dict(os.environ)
    monkeypatch.setattr(child, "python_module", lambda *_: command)


def test_the_life_of_a_child(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    runs(PROGRAM, monkeypatch)
    one = Child("a.helper", cwd=tmp_path, tells=True)
    end = time.monotonic() + 60
    while not one.has_told and time.monotonic() < end:
        time.sleep(0.01)
    assert (one.has_told, one.code) == (True, None)
    for _ in range(3):
        os.kill(one.pid, signal.SIGKILL)
        assert one.wait(60) == -signal.SIGKILL
        one.revive(most=2)
    assert caplog.text.count("the helper was killed; it is started again") == 2
    one.revive()
    assert one.wait(0.01) is None
    one.release()
    assert one.wait(60) == 7
    one.revive(most=9)
    assert one.code == 7, "it has given up on purpose"
    runs("import time; time.sleep(600)", monkeypatch)
    other = Child("a.helper", cwd=tmp_path, log_file=None)
    other.end(0.01)
    assert other.code == -signal.SIGKILL


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("print('a')", ""),
        ("import os; os.kill(os.getpid(), 9)", "SIGKILL has killed it"),
        # The signals of the job do not reach it.
        ("import os; os.kill(os.getpid(), 15); exit(3)", "exit code 3"),
        ("print('a'); raise SystemExit('why')", "why"),
        ("import time; time.sleep(600)", "not done within 3 s"),
    ],
)
def test_why_a_module_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, said: str
) -> None:
    runs(code, monkeypatch)
    assert run_module("a.module", cwd=tmp_path, timeout=3) == said
