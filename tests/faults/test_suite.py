"""The seeded minute of the fault suite; `make faults` runs all of it (tests/faults/suite.py)."""

import random
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from tests.faults.disturbed import differences
from tests.faults.suite import EVENTS, Suite

SEED = 44


@pytest.fixture(scope="module")
def suite(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Suite:
    return Suite(tmp_path_factory.mktemp("faults"), digits)


def test_a_run_that_is_killed_again_and_again_is_the_undisturbed_one(suite: Suite) -> None:
    fast = [event for event in EVENTS if event.fast]
    random.Random(SEED).shuffle(fast)
    suite.disturb(fast, SEED)
    print("\n".join(suite.table()))
    assert not suite.failed
    assert any(row.recoveries for row in suite.rows.values())


def test_the_suite_sees_a_wrong_bit(suite: Suite, tmp_path: Path) -> None:
    right = suite.undisturbed
    for file, found in {
        "steps.1": "rank 1 has other weights in step 3",
        "journal/events.jsonl": "('val/loss', 10)",
        "__1_0.distcp": "the files of the last checkpoint differ",
    }.items():
        folder = tmp_path / file.replace("/", "-")
        other = replace(right, folder=folder)
        shutil.copytree(right.folder, folder, dirs_exist_ok=True)
        assert not differences(other, right)
        path = sorted(folder.glob(f"**/{file}"))[-1]
        content = path.read_bytes()
        lines = content.splitlines(keepends=True)
        if file == "steps.1":
            lines[2] = lines[2].replace(lines[2].split()[2], b"0" * 16)
        elif file.startswith("journal"):
            lines = [line.replace(b'"val/loss":', b'"val/loss":1') for line in lines]
        else:
            lines = [content[:-1] + bytes([content[-1] ^ 1])]
        path.write_bytes(b"".join(lines))
        assert found in " ".join(differences(other, right)), file


@pytest.mark.slow
@pytest.mark.parametrize("name", [event.name for event in EVENTS if event.act])
def test_every_event(suite: Suite, name: str) -> None:
    (event,) = [each for each in EVENTS if each.name == name]
    suite.disturb([event], SEED)
    row = suite.rows[name]
    if row.not_here:
        pytest.skip(row.not_here)
    assert not suite.failed
