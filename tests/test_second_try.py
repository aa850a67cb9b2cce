"""The second try of failed tests, as tests/run.sh makes it, after real runs of pytest."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import second_try
from tests.conftest import ROOT, Completed

FLAKY = """\
import pathlib, pytest

@pytest.mark.xdist_group("some")
@pytest.mark.parametrize("x", ["a@b"])
def test_the_first_time_only(x, tmp_path_factory):
    mark = pathlib.Path(__file__).with_name("tried")
    tried = mark.exists()
    mark.touch()
    assert tried, "NOT YET"

def test_good(): pass
"""
ALWAYS = "def test_always(): assert False, 'NEVER'\n"
SKIPPED = """\
import pathlib, pytest

def test_skipped_then():
    mark = pathlib.Path(__file__).with_name("seen")
    if mark.exists(): pytest.skip("no cluster any more")
    mark.touch()
    assert False
"""


def run(folder: Path, *options: str) -> tuple[Completed, Completed]:
    """Run pytest on the tests in `folder`, then the second try; return both."""
    (folder / "pytest.ini").write_text("[pytest]\nmarkers =\n    slurm\n    xdist_group\n")
    how = ["-p", "tests.hooks", "-p", "xdist", "-p", "no:cacheprovider"]
    # The installed plugins would take a second to import.
    env = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": str(ROOT), "CI": ""}

    def python(*arguments: str) -> Completed:
        command = [sys.executable, "-m", *arguments]
        here = os.environ | env
        return subprocess.run(
            command, capture_output=True, text=True, cwd=folder, env=here, check=False
        )

    done = python("pytest", *how, *options, "--outcomes=first.json")
    return done, python("tests.second_try", f"first.json={done.returncode}", "--", *how)


def said(done: Completed) -> list[str]:
    """Return the lines that name tests of the second try."""
    return [line for line in done.stdout.splitlines() if line.startswith(("FLAKY", "FAILED T"))]


def test_a_test_that_fails_the_first_time_only_is_flaky(tmp_path: Path) -> None:
    (tmp_path / "test_flaky.py").write_text(FLAKY)
    # As with the cluster's tests: pytest-xdist appends the group to the test's id.
    first, second = run(tmp_path, "-n", "1", "--dist", "loadgroup")
    assert first.returncode == 1
    assert "NOT YET" in first.stdout
    assert second.returncode == 0, second.stdout + second.stderr
    assert said(second) == ["FLAKY: test_flaky.py::test_the_first_time_only[a@b]"]
    assert "1 passed" in second.stdout  # test_good is not run again


def test_a_test_that_fails_twice_is_a_failure(tmp_path: Path) -> None:
    (tmp_path / "test_flaky.py").write_text(FLAKY)
    (tmp_path / "test_other.py").write_text(ALWAYS)
    (tmp_path / "test_skipped.py").write_text(SKIPPED)
    _, second = run(tmp_path)
    assert second.returncode == 1
    assert said(second) == [
        "FLAKY: test_flaky.py::test_the_first_time_only[a@b]",
        "FAILED TWICE: test_other.py::test_always (failed in the second try)",
        "FAILED TWICE: test_skipped.py::test_skipped_then (skipped in the second try)",
    ]
    assert "NEVER" in second.stdout


@pytest.mark.parametrize(
    ("outcomes", "code", "result"),
    [
        ({"a": "passed", "b": "skipped"}, 0, ""),
        ({f"test_{i}": "failed" for i in range(11)}, 1, "11 tests failed, and the limit is 10"),
        ({"a": "failed"}, 3, "first: pytest ended with the exit code 3 and 1 failed tests"),
        ({"a": "failed"}, 143, "first: pytest ended with the exit code 143 and 1 failed tests"),
        # Python's own exit code is 1 too, where pytest cannot start.
        (None, 1, "first: pytest ended with the exit code 1 and 0 failed tests"),
    ],
)
def test_what_gets_no_second_try(
    outcomes: dict[str, str] | None,
    code: int,
    result: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "first.json"
    if outcomes is not None:
        file.write_text(json.dumps(outcomes))
    assert second_try.main([f"{file}={code}"]) == bool(result)
    out = capsys.readouterr().out
    assert out == (f"\n*** The failed tests are not tried again. {result}\n" if result else "")
