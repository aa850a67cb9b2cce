"""Tests of the scheduler's commands. A stand-in is killed: Slurm's signals cannot be timed."""

import logging
import os
from pathlib import Path

import pytest

from hpctrain.launch.queue import ask


@pytest.fixture
def squeue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A `squeue` whose first calls end by SIGTERM; the file `kills` holds their number."""
    program = tmp_path / "squeue"
    program.write_text(
        '#!/bin/sh\ncd "$(dirname "$0")" || exit\necho >>calls\n'
        'if [ "$(wc -l <calls)" -le "$(cat kills)" ]; then kill -TERM $$; fi\necho RUNNING\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return tmp_path


@pytest.mark.parametrize(("kills", "answer"), [(0, "RUNNING\n"), (2, "RUNNING\n"), (9, None)])
def test_a_killed_command_is_run_again(
    squeue: Path, kills: int, answer: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    (squeue / "kills").write_text(str(kills))
    with caplog.at_level(logging.ERROR):
        assert ask("squeue", "--jobs", "1") == answer
    assert len((squeue / "calls").read_text().splitlines()) == min(kills + 1, 5)
    assert ("died with <Signals.SIGTERM: 15>" in caplog.text) == (answer is None)
