"""The second try of the tests that failed: a test that then passes is FLAKY, and the run is green.

    python -m tests.second_try FILE=CODE... [-- PYTEST ARGUMENTS]

Each run of pytest has written the outcomes of its tests to a JSON FILE (`pytest --outcomes FILE`,
see tests/hooks.py), and CODE is its exit code. The failed tests run once more in one plain process
of pytest, without others beside them. The exit code is 0 if all of them pass.

There is no second try after a run of pytest that did not come to its end (a crashed worker process,
a file that cannot be collected, an internal error, wrong arguments, a signal), nor after more than
`MOST` failures, because these are no accidents.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

MOST = 10
TESTS_FAILED = 1  # pytest's exit code; see pytest.ExitCode


def main(arguments: list[str]) -> int:
    runs, options = _split(arguments)
    failed: list[str] = []
    for run in runs:
        file, _, code = run.rpartition("=")
        outcomes = _outcomes(file)
        failed += (here := [test for test, outcome in outcomes.items() if outcome == "failed"])
        if problem := _problem(int(code), outcomes, here):
            return _give_up(f"{Path(file).stem}: {problem}")
    if not failed:
        return 0
    if len(failed) > MOST:
        return _give_up(f"{len(failed)} tests failed, and the limit is {MOST}")
    print(f"\n*** THE SECOND TRY, alone, of {len(failed)} failed tests\n", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        file = f"{folder}/second.json"
        command = [sys.executable, "-m", "pytest", "-rA", f"--outcomes={file}", *options, *failed]
        code = subprocess.run(command, check=False).returncode
        again = _outcomes(file)
    print()
    # A test that is skipped in the second try has not shown that it passes.
    flaky = [test for test in failed if again.get(test) == "passed"]
    for test in flaky:
        print(f"FLAKY: {test}")
    for test in failed:
        if test not in flaky:
            print(f"FAILED TWICE: {test} ({again.get(test, 'no outcome')} in the second try)")
    return int(code != 0 or flaky != failed)


def _split(arguments: list[str]) -> tuple[list[str], list[str]]:
    end = arguments.index("--") if "--" in arguments else len(arguments)
    return arguments[:end], arguments[end + 1 :]


def _outcomes(file: str) -> dict[str, str]:
    """Return the outcome of each test; there is none if pytest did not come to its end."""
    outcomes: dict[str, str] = json.loads(Path(file).read_text()) if Path(file).exists() else {}
    return outcomes


def _problem(code: int, outcomes: dict[str, str], failed: list[str]) -> str:
    """Return why the failures of a run of pytest are no accidents of single tests, or ""."""
    if broken := [test for test, outcome in outcomes.items() if outcome == "broken"]:
        return f"a crash or a file that cannot be collected is no ordinary failure: {broken[0]}"
    if code not in (0, TESTS_FAILED) or (code == TESTS_FAILED and not failed):
        return f"pytest ended with the exit code {code} and {len(failed)} failed tests"
    return ""


def _give_up(reason: str) -> int:
    print(f"\n*** The failed tests are not tried again. {reason}", flush=True)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
