"""Commands of other packages, by their entry points."""

import os
import subprocess
import sys
from pathlib import Path

POINTS = """[hpctrain.commands]
greet = greeting:main
broken = greeting:nothing
"""


def call(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "hpctrain", *words]
    env = os.environ | {"PYTHONPATH": str(folder)}
    return subprocess.run(command, capture_output=True, text=True, env=env, check=False)


def test_another_package_brings_a_command(tmp_path: Path) -> None:
    (tmp_path / "greeting.py").write_text(
        "def main(argv):\n    print('hello', *argv)\n    return 3\n"
    )
    facts = tmp_path / "greeting-1.0.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: greeting\nVersion: 1.0\n")
    (facts / "entry_points.txt").write_text(POINTS)
    done = call(tmp_path, "greet", "you")
    assert (done.returncode, done.stdout) == (3, "hello you\n")
    broken = call(tmp_path, "broken")
    assert broken.returncode == 2
    assert "broken (greeting:nothing) is left out" in broken.stderr
    assert "broken: no such command" in broken.stderr
