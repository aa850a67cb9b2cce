"""The table of `hpctrain status`, once and again."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hpctrain.commands import logs
from hpctrain.commands.facts import Facts
from hpctrain.insight.report.account.run_account import read
from hpctrain.runs.run_dir import RunDir
from hpctrain.tracking import samples
from hpctrain.tracking.meta import Meta, left_behind
from tests import forkserver
from tests.conftest import Completed, ignoring_sigint, run_json, run_module
from tests.made_runs import ATTEMPT, BEAT, make_run, status_json

Train = Callable[..., Completed]


def test_status_of_runs_that_end_here(
    train: Train, tmp_path: Path, no_slurm: None, capsys: pytest.CaptureFixture[str]
) -> None:
    train("train.max_steps=3", "tracking=off")
    train("train.max_steps=3", "tracking=off", "model.dropout=7", code=2)
    (tmp_path / "runs" / "digits-0000000d").mkdir()
    (tmp_path / "runs" / "digits-0000000d" / "run.json").write_text("{")
    rows = {row["state"]: row for row in status_json(tmp_path / "runs")}
    assert rows.keys() == {"finished", "failed", "damaged"}
    finished, failed = rows["finished"], rows["failed"]
    assert (finished["step"], finished["max_steps"], finished["metric"]) == (3, 3, "val/accuracy")
    assert 0 <= finished["metrics"]["val/accuracy"] <= 1
    assert failed["reason"].startswith("ConfigError: model._target_")
    shown = run_module("hpctrain", "status", cwd=tmp_path).stdout
    assert "3 runs in runs" in shown
    assert "1 failed, 1 damaged, 1 finished" in shown
    # Their logs are kept, though they were started in a terminal.
    name = Path(finished["run"]).name
    log = run_module("hpctrain", "logs", name, cwd=tmp_path)
    assert f"{name}/logs/terminal_1.rank0.log <==" in log.stderr
    assert "step 3/3  loss" in log.stdout
    assert logs.main([failed["run"]]) == 0
    said = capsys.readouterr()
    assert "rank 0 says:" in said.out
    assert "terminal_1.rank0.log" in said.err
    assert "error: model._target_" in said.out


def test_watching_ends_by_itself_and_by_ctrl_c(tmp_path: Path, no_slurm: None) -> None:
    run = make_run(tmp_path, state="finished", attempts=[{}])
    where = ("status", "--dir", str(tmp_path), "--watch=2")
    assert run_module("hpctrain", *where).stdout.count("1 finished") == 1
    with RunDir(run).lock():
        (run / "run.json").write_text(json.dumps({"state": "running", "attempts": [ATTEMPT]}))
        command = [sys.executable, "-u", "-m", "hpctrain", *where]
        with ignoring_sigint():  # the command heeds Ctrl-C all the same
            watching = forkserver.Popen(command, stdout=subprocess.PIPE, text=True)
        with watching:
            assert watching.stdout is not None
            seen = ""
            while seen.count("1 running") < 2:
                seen += watching.stdout.readline()
            watching.send_signal(signal.SIGINT)
            assert watching.wait(60) == 0
    wrong = run_module("hpctrain", "status", "--watch", run.name, code=2)
    assert "give the run first" in wrong.stderr


def test_the_commands_import_nothing_heavy(tmp_path: Path, no_slurm: None) -> None:
    run = make_run(tmp_path)
    (run / "logs" / "1_0_log.out").write_text("hello\n")
    program = (
        "import json, sys; from hpctrain.cli import main\n"
        "for words in json.loads(sys.argv[1]):\n"
        "    sys.argv[1:] = words\n"
        "    try: main()\n"
        "    except SystemExit as end: code = end.code\n"
        "    heavy = {'torch', 'mlflow', 'h5py', 'hydra', 'submitit', 'optuna'} & {*sys.modules}\n"
        "    if heavy or code: sys.exit(f'{words} imported {heavy}' if heavy else code)\n"
    )
    commands = (["status"], ["logs", run.name], ["cancel", "--all"], ["gc"])
    words = [[*command, "--dir", str(tmp_path)] for command in commands]
    words += [[command[0], "--help"] for command in commands]
    given = [sys.executable, "-c", program, json.dumps(words)]
    done = subprocess.run(given, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for command in commands:
        assert f"usage: python -m hpctrain {command[0]}" in done.stdout


def test_another_users_uploader_is_not_called_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path, state="finished")
    Meta("sqlite:////x", "exp", "name", "uid").write(run)
    for name in ("upload.lock", "uploader.log"):
        (run / "journal" / name).touch()
    assert "its uploader has ended" in left_behind(run)
    # A mock, because the kernel lets root read everything.
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).name != "upload.lock")
    assert left_behind(run) == ""


def test_attempts_that_were_killed_have_taken_time(tmp_path: Path) -> None:
    run = RunDir(make_run(tmp_path))
    now = time.time()
    signs = samples.SampleWriter(samples.folder(run.path) / "n01.jsonl")
    # Killed after 240 s, at the start-up after 60 s, and before anything was heard of it.
    for begun_s, heartbeat_s, sample_s in ((1000, 760, 770), (500, None, 440), (200, None, None)):
        run.begin_attempt(host="n01")
        content = run_json(run.path)
        content["attempts"][-1]["started"] = now - begun_s
        (run.path / "run.json").write_text(json.dumps(content))
        if heartbeat_s:
            beat = BEAT | {"time": now - heartbeat_s}
            (run.path / "progress.json").write_text(json.dumps(beat))
        if sample_s:
            signs.write(now - sample_s, metrics={"cpu_utilization_percentage": 1.0})
    signs.close()
    facts = Facts.read(run.path)
    assert facts.trained_s(None) == pytest.approx(240 + 60, abs=0.01)
    assert facts.trained_s(now) == pytest.approx(240 + 60 + 200, abs=0.01)
    (account,) = read([run.path])
    assert [round(span.end - span.begin) for span in account.spans] == [240, 60, 0]
