"""A part of a user is called around the steps of any loop, and goes on after a pause."""

from pathlib import Path

import pytest

from tests.conftest import hpctrain_on, journal_metrics
from tests.session import runs_of_own

PART = "hooks=[{_target_: counted.Counted, factor: 2}]"
SHORT = ("train.log_every=2", "train.max_steps=6", "train.global_batch_size=64")


@pytest.mark.parametrize("loop", ["gan", "supervised"])
def test_a_part_counts_rows(loop: str, digits: Path, tmp_path: Path) -> None:
    given = ("--config-dir", str(runs_of_own.PROGRAMS / "conf"), f"loop={loop}", PART, *SHORT)
    given += ("experiment=digits",) if loop == "supervised" else ()
    given += runs_of_own.common(digits, tmp_path)
    run = hpctrain_on(1, "freeze", *given, **runs_of_own.at({})).stdout.strip()
    hpctrain_on(1, "run", run, "--until-step", "3", **runs_of_own.at({}))
    hpctrain_on(1, "run", run, **runs_of_own.at({}))
    found = journal_metrics(Path(run))
    rows = {step: n for (name, step), n in found.items() if name == "train/rows"}
    assert rows == {2: 256.0, 3: 384.0, 4: 512.0, 6: 768.0}  # step 3 is that of the pause


def test_two_parts_with_one_name_are_refused(digits: Path, tmp_path: Path) -> None:
    twice = "hooks=[{_target_: counted.Counted}, {_target_: counted.Counted}]"
    given = ("experiment=digits", "train.max_steps=2", twice, *runs_of_own.common(digits, tmp_path))
    done = hpctrain_on(1, *given, **runs_of_own.at({"code": 2}))
    assert "hooks: two parts have the name 'hooks.counted'" in done.stderr
