"""The file of a search's study, after a kill."""

import logging
import os
import signal
from multiprocessing import get_context
from pathlib import Path

import optuna
import pytest
from optuna.distributions import FloatDistribution

from hpctrain.search.study_file import _Lock, study_storage


def _die_in_a_record(file: Path) -> None:
    _Lock(file).acquire()
    with open(file, "ab") as journal:
        journal.write(b'{"op_code":4,"worker_id":"of')
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_kill_in_a_record_costs_this_record_only(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file, space = tmp_path / "sweeps" / "digits.optuna", {"lr": FloatDistribution(0, 1)}
    study = optuna.create_study(storage=study_storage(file), study_name="digits")
    study.tell(study.ask(space), 0.5)
    child = get_context("fork").Process(target=_die_in_a_record, args=(file,))
    child.start()
    child.join()
    assert child.exitcode == -signal.SIGKILL
    assert not file.read_bytes().endswith(b"\n")
    again = optuna.load_study(storage=study_storage(file), study_name="digits")
    assert again.best_value == 0.5
    with caplog.at_level(logging.WARNING):
        again.tell(again.ask(space), 0.25)  # the lock of the dead process does not block
    assert "was not written to its end" in caplog.text
    later = optuna.load_study(storage=study_storage(file), study_name="digits")
    assert [trial.value for trial in later.trials] == [0.5, 0.25]
    assert {trial.params["lr"] for trial in later.trials}.isdisjoint({None})
