"""CI accepts only declared skips, and the tests that are left out are counted."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

TESTS = """\
import pytest

def test_good(): pass

@pytest.mark.skipif(True, reason="no CUDA device")
def test_declared(): pass

@pytest.mark.xfail
def test_expected(): assert False

@pytest.mark.slow
def test_long(): pass

def test_in_the_middle(): pytest.skip("the moon is full")

@pytest.mark.skip(reason="too difficult")
def test_by_a_mark(): pass

@pytest.fixture
def absent(): pytest.importorskip("none_such")

def test_by_a_fixture(absent): pass
"""


def outcome(folder: Path, *options: str, ci: str = "") -> tuple[dict[str, int], str]:
    """Run pytest on the tests in `folder`; return the counts (passed, failed, ...) and stdout."""
    (folder / "pytest.ini").write_text("[pytest]\nmarkers =\n    slow\n    slurm\n")
    command = [sys.executable, "-m", "pytest", "-p", "tests.hooks", "-c", f"{folder}/pytest.ini"]
    command += ["-p", "no:cacheprovider", "-p", "xdist", *options, str(folder)]
    # The installed plugins would take a second to import.
    env = os.environ | {"CI": ci, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=env, check=False)
    counts = re.findall(r"(\d+) (\w+)", done.stdout.strip().splitlines()[-1].split(" in ")[0])
    return {name: int(count) for count, name in counts}, done.stdout


def test_a_skip_is_a_failure_in_ci_only(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(TESTS)
    counts, _ = outcome(tmp_path)
    assert counts == {"passed": 1, "skipped": 4, "xfailed": 1, "deselected": 1}
    counts, said = outcome(tmp_path, ci="true")
    failed = counts["failed"] + counts.get("errors", counts.get("error", 0))
    assert (counts["passed"], counts["skipped"], counts["xfailed"], failed) == (1, 1, 1, 3)
    for reason in ("the moon is full", "too difficult", "could not import 'none_such'"):
        assert reason in said


def test_a_module_that_skips_itself_fails_in_ci(tmp_path: Path) -> None:
    (tmp_path / "test_absent.py").write_text("import pytest\npytest.importorskip('none_such')\n")
    assert outcome(tmp_path)[0] == {"skipped": 1}
    counts, said = outcome(tmp_path, ci="true")
    assert list(counts) == ["error"]
    assert "could not import 'none_such'" in said


def test_files_without_a_test_of_the_cluster_are_not_imported_for_them(tmp_path: Path) -> None:
    (tmp_path / "test_cluster.py").write_text(
        "import pytest\n@pytest.mark.slurm\ndef test_a(): pass\ndef test_b(): pass\n"
    )
    (tmp_path / "test_other.py").write_text("def test_c(): pass\n")
    assert outcome(tmp_path, "-m", "slurm")[0] == {"passed": 1, "deselected": 1}
    assert outcome(tmp_path, "-m", "not slurm")[0] == {"passed": 2, "deselected": 1}


@pytest.mark.parametrize(
    "options", [(), pytest.param(("-n", "2"), marks=pytest.mark.slow), ("--all",), ("-m", "slow")]
)
def test_slow_tests_are_left_out_and_counted(tmp_path: Path, options: tuple[str, ...]) -> None:
    (tmp_path / "test_some.py").write_text(TESTS)
    counts, said = outcome(tmp_path, *options)
    told = "1 slow tests were left out: make test-all runs them" in said
    assert told == (options in ((), ("-n", "2")))
    assert counts["passed"] == (2 if options == ("--all",) else 1)
