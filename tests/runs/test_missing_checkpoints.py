"""A run whose checkpoints are gone does not start again in silence."""

import json
import logging
import os
from pathlib import Path

import pytest

from hpctrain.config.identity import run_path
from hpctrain.config.schema import Config
from hpctrain.errors import StorageError
from hpctrain.runs.chosen_checkpoint import chosen_checkpoint
from hpctrain.runs.freeze import freeze
from hpctrain.runs.run_dir import RunDir
from hpctrain.runs.start_again import refuse_lost_checkpoints
from hpctrain.tracking.journal import Journal, journal_path, last_step
from tests.conftest import run_json


def trained(folder: Path, step: int) -> tuple[Config, RunDir]:
    """Return a run that was killed after it had logged the metrics of a step."""
    config = Config(name="digits", output_dir=str(folder))
    config.data.path = "/data"
    run = RunDir(run_path(config, "digest"), "digest")
    freeze(config, run)
    run.begin_attempt()
    journal = Journal(run.path)
    for each in (*range(20, step, 200), step):
        journal.append("metrics", step=each, metrics={"x" * 50: 1.0})
    journal.append("status", status="RUNNING")
    journal.close()
    return config, run


def test_a_run_that_has_lost_its_checkpoints_is_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config, run = trained(tmp_path, 5000)
    assert last_step(journal_path(run.path)) == 5000
    before = run.read()
    said = r"was at step 5000.*train\.from_scratch=true"
    with pytest.raises(StorageError, match=said):
        refuse_lost_checkpoints(run, config.checkpoint)
    with pytest.raises(StorageError, match=said):
        freeze(config, run)
    assert run.read() == before
    frozen = run.config_file.read_bytes()
    config.train.from_scratch = True
    with run.lock(), pytest.raises(StorageError, match=f"in use by process {os.getpid()}"):
        freeze(config, run)
    (run.checkpoints / "step-00004900").mkdir(parents=True)
    with run.lock(), pytest.raises(StorageError, match="in use"):
        freeze(config, run)
    assert run.config_file.read_bytes() == frozen
    (run.checkpoints / "step-00004900").rmdir()
    with pytest.raises(StorageError):  # in a job: the key holds for the command that has it
        refuse_lost_checkpoints(run, config.checkpoint)
    with caplog.at_level(logging.WARNING):
        freeze(config, run)
    assert f"{run.path} was at step 5000 and has no checkpoint" in caplog.text
    kept = Path(f"{run.path}.1")
    assert run_json(kept)["uid"] == before.uid != run.read().uid
    assert last_step(journal_path(kept)) == 5000
    assert last_step(journal_path(run.path)) == 0
    freeze(config, run)
    assert not Path(f"{run.path}.2").exists()


def test_the_config_of_a_finished_run_is_written_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config, run = trained(tmp_path, 420)
    run.end_attempt("finished", result={"step": 420})
    frozen = run.config_file.read_bytes()
    for damage in (run.config_file.unlink, lambda: run.config_file.write_bytes(frozen[:90])):
        damage()
        with caplog.at_level(logging.WARNING):
            freeze(config, run)
        assert run.config_file.read_bytes() == frozen
        assert f"{run.config_file} was missing or damaged, and is written again" in caplog.text
        caplog.clear()
    freeze(config, run)
    assert (caplog.text, run.read().state) == ("", "finished")
    with pytest.raises(StorageError, match="no checkpoint; there are: none"):
        chosen_checkpoint(run)


@pytest.mark.parametrize(
    ("step", "change", "allowed"),
    [
        (400, {}, True),  # until then the save of step 200 may be under way in the background
        (420, {}, False),
        (20, {"state": "interrupted", "attempts": [{"state": "interrupted", "step": 7}]}, False),
        (20, {"state": "interrupted", "attempts": [{"state": "interrupted", "step": 0}]}, True),
        (420, {"state": "finished"}, True),
        (420, {"attempts": []}, True),
    ],
)
def test_when_a_checkpoint_must_be_there(
    tmp_path: Path, step: int, change: dict[str, object], allowed: bool
) -> None:
    config, run = trained(tmp_path, step)
    run.update(**change)
    if allowed:
        refuse_lost_checkpoints(run, config.checkpoint)
        return
    with pytest.raises(StorageError):
        refuse_lost_checkpoints(run, config.checkpoint)
    place = run.checkpoints / "step-00000200.old"  # a kill while it was replaced
    place.mkdir(parents=True)
    refuse_lost_checkpoints(run, config.checkpoint)
    place.rename(place.with_suffix(""))
    refuse_lost_checkpoints(run, config.checkpoint)


def test_without_tracking_the_heartbeat_counts(tmp_path: Path) -> None:
    config, run = trained(tmp_path, 20)
    journal_path(run.path).unlink()
    (run.path / "progress.json").write_text(json.dumps({"step": 401}))
    with pytest.raises(StorageError, match="was at step 401"):
        refuse_lost_checkpoints(run, config.checkpoint)
