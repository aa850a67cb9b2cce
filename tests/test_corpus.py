"""What 0.1.0 has written is read as it was meant: runs, checkpoints, journals and data sets.

`tests/corpus/0.1.0` was made by the code before files were records. The first run is a training;
the second one has every key of run.json, and numbers that are not finite.
"""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from hpctrain.base.gone import without_gone_keys
from hpctrain.base.names.run_record import AttemptRecord, BestValue, RunRecord, Submission
from hpctrain.commands import status
from hpctrain.commands.facts import Facts
from hpctrain.config.frozen import dump, load, values_of
from hpctrain.config.identity import run_path
from hpctrain.data.shards.index import Index
from hpctrain.insight.report.account.history import History
from hpctrain.runs.checkpoints.manifest import Manifest
from hpctrain.runs.run_dir import RunDir
from hpctrain.tracking import samples
from hpctrain.tracking.journal import journal_path, read_all
from hpctrain.tracking.meta import Meta

TRAINED, MADE = "digits-968707dd", "digits-0db66357"


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    return Path(shutil.copytree(Path(__file__).parent / "corpus" / "0.1.0", tmp_path / "old"))


def _with(names: Any, values: Any) -> Any:
    """Return the values at these names only."""
    if not isinstance(names, dict):
        return values
    return {name: _with(inner, values[name]) for name, inner in names.items()}


def test_runs_of_0_1_0(corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = corpus / "runs"
    assert status.main(["--dir", str(runs), "--json"]) == 0
    rows = {Path(row["run"]).name: row for row in json.loads(capsys.readouterr().out)}
    assert {name: (row["state"], row["step"]) for name, row in rows.items()} == {
        TRAINED: ("finished", 6),
        MADE: ("finished", 7),
    }
    for name in (TRAINED, MADE):
        run, content = RunDir.open(runs / name), (runs / name / "run.json").read_bytes()
        config = load(run.config_file)
        # What is new since then has its default, what has left had it; all else is as it was.
        before = without_gone_keys(values_of(run.config_file), run.config_file)
        assert _with(before, yaml.safe_load(dump(config))) == before
        assert RunDir(run_path(config, run.read().data_digest), run.read().data_digest).name == name
        run.update()
        assert (runs / name / "run.json").read_bytes() == content
    record = RunRecord.of(runs / MADE)
    assert record.submission == Submission(
        script="/home/me/runs/sweeps/a/array-0/job.sh", task=3, user="me", time=1.7e9
    )
    assert record.attempts[0].environment == {"python": "3.11.7"}
    assert (record.attempt.first_step, record.attempt.code_changed) == (5, "a.py differs")
    assert record.result is not None
    assert math.isnan(record.result["val/loss"])
    assert record.result["train/loss"] == math.inf
    assert (record.left_out, record.lowered_in) == (((3, 192),), ("12_3", 0))
    assert record.attempts[0] != AttemptRecord()
    facts = Facts.read(runs / MADE)
    assert (facts.damage, math.isnan(facts.progress.metrics["val/loss"])) == ("", True)


def test_the_journal_and_the_checkpoints_of_0_1_0(corpus: Path) -> None:
    run = corpus / "runs" / TRAINED
    records = list(read_all(journal_path(run)))
    lines = journal_path(run).read_bytes().splitlines()
    assert [record.body for record in records] == [json.loads(line) for line in lines]
    history = History.read(run)
    assert (history.damaged, history.series("train/loss").steps.tolist()) == (0, [2, 4, 6])
    assert len(history.times) > 0
    assert Meta.read(run).experiment == "hpctrain"
    assert next(samples.read(run / "monitor" / "vm.jsonl")).number == 0
    for step in (3, 6):
        folder = run / "checkpoints" / f"step-{step:08d}"
        content = json.loads((folder / "manifest.json").read_bytes())
        found = Manifest.read(folder)
        assert (found.step, found.progress) == (step, content["progress"])
        assert found.files == content["files"]
        found.write(folder)
        assert json.loads((folder / "manifest.json").read_bytes()) == content
    best = RunRecord.of(run).best
    assert isinstance(best, BestValue)
    assert best.metric == "val/loss"


def test_data_sets_of_0_1_0(corpus: Path) -> None:
    file = corpus / "digits" / "index.json"
    content = file.read_bytes()
    index = Index.load(corpus / "digits")
    assert (index.split("train").count, index.split("val").count) == (1415, 382)
    index.save(corpus / "digits")
    assert file.read_bytes() == content
