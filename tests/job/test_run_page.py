"""What a training puts on its page in MLflow, and the cause of its end if rank 1 failed first."""

import json
from pathlib import Path

import pytest

from hpctrain.base.names.run_record import AttemptKey
from hpctrain.cluster.ranks.ranks import RankInfo
from hpctrain.config.composing.compose import words
from hpctrain.config.identity import run_path
from hpctrain.config.schema import Config
from hpctrain.engine.job.run_page import tags
from hpctrain.runs.freeze import freeze
from hpctrain.runs.run_dir import RunDir
from hpctrain.runs.state import failure


def test_the_tags_of_a_run(tmp_path: Path) -> None:
    config = Config(output_dir=str(tmp_path / "my runs"))
    run = RunDir(run_path(config, "xxh3_128:00"), "xxh3_128:00")
    given = ["--config-dir", "/x", "experiment=digits", "hooks=[a|b]"]
    freeze(config, run, *words(given))
    alone = RankInfo.from_env({"HPCTRAIN_LAUNCHER": "single"})
    found = tags(run, alone, {"torch": "2.13"})
    assert found["hpctrain.run"] == str(run.path)
    assert found["hpctrain.env.torch"] == "2.13"
    run.update(submission={"script": "job.sh"}, attempts=[{"job_id": "7_1"}, {"job_id": "8_1"}])
    found = tags(run, alone, {})
    assert found["hpctrain.job_id"] == "7_1 8_1"


def test_a_failure_of_an_earlier_start_is_not_the_cause(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="now"), failure.recorded(tmp_path, AttemptKey()):
        raise ValueError("now")
    assert getattr(failure.first(tmp_path, AttemptKey()), "error", "") == "ValueError: now"
    content = json.loads(failure.Failure.path(tmp_path).read_text())
    failure.Failure.path(tmp_path).write_text(
        json.dumps({**content, "time": content["time"] - 1e6})
    )
    assert failure.first(tmp_path, AttemptKey()) is None
