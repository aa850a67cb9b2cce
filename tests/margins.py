"""`python -m tests.margins [TESTS]`: how far the comparisons of floats are from their bounds.

Each test is run with each set of vector instructions that ATen has on this machine
(ATEN_CPU_CAPABILITY). A margin is the bound divided by what was measured; below 10 a test may fail
on another CPU. The table is in tests/margins.md.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

CAPABILITIES = ("default", "avx2", "avx512")
LEAST = 10.0
# What compares by these is no rounding: statistics of drawn numbers, figures of a measurement or a
# plan, curves, formats of 8 and 16 bits. Every rank and machine computes the same there, and the
# bound says how good an estimate must be.
TESTS = ("parallel", "training", "trained", "checkpoint", "models", "tasks", "job", "data")


def measure(tests: list[str], capability: str) -> dict[tuple[str, str, str], float]:
    """Run the tests; return the largest part of its bound that each comparison has used."""
    with tempfile.TemporaryDirectory() as folder:
        env = os.environ | {"HPCTRAIN_MARGINS": folder, "ATEN_CPU_CAPABILITY": capability}
        command = [sys.executable, "-m", "pytest", "-q", "-m", "not slurm and not slow", *tests]
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
        print(capability, done.stdout.strip().splitlines()[-1], file=sys.stderr)
        if done.returncode:
            print(done.stdout[-5000:], file=sys.stderr)
        found: dict[tuple[str, str, str], float] = defaultdict(float)
        for file in Path(folder).glob("*.jsonl"):
            for line in map(json.loads, file.read_text().splitlines()):
                test = re.sub(r"\[.*\]$", "", line["test"].removeprefix("tests/"))
                key = test, line["where"], line["bound"]
                found[key] = max(found[key], line["ratio"])
    return found


def main(tests: list[str]) -> None:
    """Print the table, with the smallest margins first."""
    chosen = tests or [f"tests/{name}" for name in TESTS]
    by_capability = [measure(chosen, capability) for capability in CAPABILITIES]
    rows = []
    for key in sorted(set().union(*by_capability)):
        ratios = [found.get(key, 0.0) for found in by_capability]
        if worst := max(ratios):
            rows.append((1 / worst, key, [1 / ratio if ratio else None for ratio in ratios]))
    print(f"| margin | {' | '.join(CAPABILITIES)} | test | compared in | bound |")
    print("|---|---|---|---|---|---|---|")
    for margin, (test, where, bound), each in sorted(rows):
        shown = " | ".join("equal" if one is None else f"{one:.3g}" for one in each)
        print(f"| {margin:.3g} | {shown} | {test} | {where} | {bound} |")


if __name__ == "__main__":
    main(sys.argv[1:])
