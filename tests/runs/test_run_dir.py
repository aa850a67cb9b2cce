"""Several processes may change run.json at a time."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from hpctrain.config.frozen import dump, load
from hpctrain.config.schema import Config
from hpctrain.errors import ConfigError
from hpctrain.runs.run_dir import RunDir
from tests.conftest import run_json


def test_changes_of_several_processes_are_all_kept(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    (tmp_path / "run.json").write_text('{"state": "created", "attempts": []}')
    program = (
        "import sys; from pathlib import Path; from hpctrain.runs.run_dir import RunDir\n"
        "run = RunDir(Path(sys.argv[1]))\n"
        "for number in range(30): run.begin_attempt(who=sys.argv[2], number=number)"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    writers = [subprocess.Popen([*command, who]) for who in "abc"]
    for number in range(30):
        run.update(job_id=f"7_{number}")
    assert [writer.wait(60) for writer in writers] == [0, 0, 0]
    content = run_json(tmp_path)
    assert content["job_id"] == "7_29"
    assert sorted((a["who"], a["number"]) for a in content["attempts"]) == [
        (who, number) for who in "abc" for number in range(30)
    ]


def test_a_frozen_config_that_was_cut_or_changed_is_an_error(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run-00000001")
    config = Config()
    config.data.path = "/data"
    run.freeze(dump(config))
    frozen = run.config_file.read_text()
    assert load(run.config_file).train == config.train
    changed = load(run.config_file, ["site.account=0123", "site.modules=[3.10]"]).site
    assert (changed.account, changed.modules) == ("0123", ["3.10"])
    for text in ("launch.time_min=12:00:00", "train.max_steps=010"):
        with pytest.raises(ConfigError, match=f"^{text}: line 1: .*: programs read this"):
            load(run.config_file, [text])
    lines = frozen.splitlines(keepends=True)
    for damaged in ("".join(lines[: len(lines) // 2]), frozen.replace("seed: 0", "seed: 1")):
        run.config_file.write_text(damaged)
        with pytest.raises(ConfigError, match="damaged, or was changed after it was frozen"):
            load(run.config_file)
    # A job may read either file while a run is frozen again, and the last one counts afterwards.
    config.train.log_every = 7
    run.freeze(dump(config))
    assert load(run.config_file).train == config.train
    run.config_file.write_text(frozen)
    assert load(run.config_file).train.log_every is None


def test_a_config_from_before_there_were_digests_is_read_if_it_is_whole(tmp_path: Path) -> None:
    config = Config()
    config.data.path = "/data"
    run = RunDir(tmp_path / "run-00000001")
    run.freeze(dump(config))
    record = run_json(run.path)
    del record["config_digests"]
    (run.path / "run.json").write_text(json.dumps(record))
    frozen = run.config_file.read_text()
    assert load(run.config_file).train == config.train
    lines = frozen.splitlines(keepends=True)
    ends = [place for place, line in enumerate(lines) if line.startswith(("  clip_norm", "site:"))]
    for end in (*ends, len(lines) - 1):
        run.config_file.write_text("".join(lines[:end]))
        with pytest.raises(
            ConfigError, match=r"it is damaged: it ends before site\.container\.args"
        ):
            load(run.config_file)
    run.config_file.write_text(frozen)
    config.seed = 1
    run.freeze(dump(config))  # the crash of a moment ago may have left the old file
    run.config_file.write_text(frozen)
    assert load(run.config_file).seed == 0
