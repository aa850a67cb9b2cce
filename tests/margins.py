"""`python -m tests.margins [TESTS]`: how far the comparisons of floats are from their bounds.

Each test is run with each set of vector instructions that ATen has on this machine
(ATEN_CPU_CAPABILITY), and `tests.bounds` notes what each comparison has measured. A margin is the
bound divided by that; below 10 a test may fail on another CPU, and the exit code is 1. The table of
all tests is in tests/margins.md.
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
LEAST = 10.0  # a margin below it is too small
SHOWN = 1e4  # larger ones are counted only
COMPARES = re.compile(r"allclose|assert_close|approx\(|within\(|check_equal|check_near")
# Comparisons that are not about rounding. The bound says how good an estimate or a format is, and
# what is measured is the same on every machine, but for rounding, which is far smaller.
OTHERWISE = {
    "plan/test_answer.py::test_the_interval_between_checkpoints": "a published figure is rounded",
    "plan/test_published.py::test_the_rows_of_deepspeeds_estimators": "published figures, rounded",
    "data/test_transforms.py::test_normalise_is_that_of_the_formula": "formats of 16 bits",
    "data/test_transforms.py::test_draws_are_uniform_and_independent": "means of seeded draws",
    "data/test_workers.py::test_streams_of_neighbours_are_independent": "means of seeded draws",
    "data/test_mixture.py::test_a_tempered_mixture": "shares are whole parts of 65,536",
    "data_prep/test_flow.py::test_without_viscosity_both_are_kept": "error of a solver's time step",
    "training/test_meter.py::test_a_run_logs_registered_metrics_and_where_its_time_went": "seconds",
    "training/test_train_step.py::test_groups_of_parameters_keep_the_ratio_of_their_rates": (
        "Adam's eps and the weight decay"
    ),
    "models/test_transformer.py::test_initial_weights": "spread of seeded draws",
    "models/test_transformer.py::test_initialised_module_by_module_from_the_meta_device": (
        "spread of seeded draws"
    ),
    "test_hardware.py::test_figures_agree_with_each_other": "data sheets are rounded",
    "report/test_sweeps.py::test_seeds_become_a_table": "a quantile, written with few digits",
}
Key = tuple[str, str, str]


def measure(tests: list[str], capability: str) -> dict[Key, float]:
    """Run the tests; return the largest part of its bound that each comparison has used."""
    with tempfile.TemporaryDirectory() as folder:
        env = {"HPCTRAIN_MARGINS": folder, "ATEN_CPU_CAPABILITY": capability}
        command = [sys.executable, "-m", "pytest", "-q", "-m", "not slurm and not slow", *tests]
        done = subprocess.run(
            command, env=os.environ | env, capture_output=True, text=True, check=False
        )
        print(f"{capability}: {done.stdout.strip().splitlines()[-1]}", file=sys.stderr)
        if done.returncode:
            sys.exit(done.stdout[-5000:])
        found: dict[Key, float] = defaultdict(float)
        for file in Path(folder).glob("*.jsonl"):
            for line in map(json.loads, file.read_text().splitlines()):
                test = re.sub(r"\[.*$", "", line["test"].removeprefix("tests/"))
                key = test, line["where"].rpartition(":")[2], line["bound"]
                found[key] = max(found[key], line["ratio"])
    return found


def main(tests: list[str]) -> int:
    """Print the table, with the smallest margins first."""
    files = sorted(Path("tests").rglob("test_*.py"))
    chosen = tests or [str(file) for file in files if COMPARES.search(file.read_text())]
    by_capability = [measure(chosen, capability) for capability in CAPABILITIES]
    rows: list[tuple[float, Key, str]] = []
    for key in sorted(set().union(*by_capability)):
        ratios = [found.get(key, 0.0) for found in by_capability]
        shown = " | ".join(f"{1 / ratio:.3g}" if ratio else "equal" for ratio in ratios)
        rows.append((1 / max(ratios) if any(ratios) else float("inf"), key, shown))
    exact = [margin for margin, (_, _, bound), _ in rows if bound == "1e-09"]
    least = f", the smallest margin {min(exact):.2g}" if exact else ""
    print(f"{len(rows)} comparisons; {len(exact)} are of parity in float64{least}.\n")
    print(f"Margins below {SHOWN:g}:\n")
    print(f"| margin | {' | '.join(CAPABILITIES)} | test | compared in | bound | no rounding |")
    print("|---|---|---|---|---|---|---|---|")
    small = []
    for margin, (test, where, bound), shown in sorted(rows):
        reason = OTHERWISE.get(test, "")
        if margin < LEAST and not reason:
            small.append(test)
        if margin < SHOWN:
            place = "" if where in test else where
            print(f"| {margin:.3g} | {shown} | {test} | {place} | {bound} | {reason} |")
    if small:
        print(f"margins below {LEAST:g}: {', '.join(small)}", file=sys.stderr)
    return 1 if small else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
