"""Batch scripts that older versions have queued, and copies of their templates, still work."""

import subprocess
import sys
from pathlib import Path


def said(module: str, *words: str) -> tuple[int, str]:
    command = [sys.executable, "-m", module, *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout


def test_names_of_before_answer_as_those_of_now(tmp_path: Path) -> None:
    assert said("hpctrain.slurm.steps") == said("hpctrain.cluster.slurm.steps")
    assert "run_steps" in said("hpctrain.slurm.steps")[1]
    words = (str(tmp_path / "none"), "1", "0")
    assert said("hpctrain.job.verdict", *words) == said("hpctrain.engine.job.verdict", *words)
