"""Measures the time that the command line takes to start, beside the import of Hydra.

python -m pytest tests/benchmarks --benchmark-only
"""

import subprocess
import sys
from typing import Any

import pytest

COMMANDS = {
    "help": ["-m", "hpctrain", "--help"],
    "env": ["-m", "hpctrain", "doctor", "--env"],
    "import hydra": ["-c", "import hydra"],
    "python": ["-c", ""],
}


@pytest.mark.parametrize("name", COMMANDS)
def test_startup(benchmark: Any, name: str) -> None:
    command = [sys.executable, *COMMANDS[name]]

    def start() -> None:
        subprocess.run(command, stdout=subprocess.DEVNULL, check=True)

    benchmark.pedantic(start, rounds=10, warmup_rounds=2)
