"""`hpctrain resume` continues from the frozen config, with the copied or the current code."""

import json
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hpctrain.base.files import disk
from hpctrain.commands import resume as resume_command
from hpctrain.config.frozen import dump, load
from hpctrain.errors import ConfigError, HpctrainError
from hpctrain.runs.run_dir import RunDir
from tests import cluster, forkserver
from tests.cluster import Paced
from tests.conftest import NET, Completed, run_json, run_module, runs

Train = Callable[..., Completed]


def test_it_does_not_wait_for_hydra() -> None:
    code = "import sys, hpctrain.commands.resume; print({'hydra', 'torch'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def interrupt(digits: Path, folder: Path, paced: Paced) -> Path:
    """Return a run that Ctrl-C stopped and that has saved; from then on its steps do not sleep."""
    where = [f"data.path={digits}", f"output_dir={folder}/runs", "tracking=off"]
    where += ["launch.snapshot=off"]  # each rank would compile the copy; the slow test has copies
    long = ["train.max_epochs=10", "checkpoint.every_steps=20", "launch.wait=true", paced.task]
    command = [sys.executable, "-m", "hpctrain", "experiment=digits", *where, *long]
    process = forkserver.Popen(command, stderr=subprocess.DEVNULL, cwd=folder)
    while not (found := list(folder.glob("runs/*/checkpoints/step-????????"))):
        assert process.poll() is None
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=120) == 130
    paced.go()
    return found[0].parents[1]


def test_an_interrupted_run_is_resumed_and_only_its_place_may_change(
    digits: Path,
    tmp_path: Path,
    no_sbatch: dict[str, str],
    paced: Paced,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = interrupt(digits, tmp_path, paced)
    before = run_json(run)
    assert before["state"] == "interrupted"

    def resume(*arguments: str, code: int = 0) -> Completed:
        return run_module("hpctrain", "resume", *arguments, code=code, cwd=tmp_path, **no_sbatch)

    # Some commands are called in this process.
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(os.environ["PYTHONPATH"].partition(":")[0])  # of `paced`
    monkeypatch.setenv("PATH", no_sbatch["PATH"])
    for override, message in {
        "optimizer.lr=0.5": "it would be another run",
        "name=other": "name=other: an existing run keeps its name and its folder",
        "site=mine": "site=mine: only single values of a frozen config change, site.KEY=VALUE",
        "launch.nodse=2": "unknown key launch.nodse: did you mean launch.nodes",
        "launch.nodes=two": "launch.nodes='two': it must be a number of nodes",
        "launch.nodes=2": "launch.nodes=2: sbatch is not on the PATH",
    }.items():
        with pytest.raises(HpctrainError) as refusal:
            resume_command.main([run.name, override])
        assert message in str(refusal.value)
    assert "no_such: no run or sweep of that name" in resume("no_such", code=2).stderr
    assert run_json(run) == before
    RunDir(run).update(code="0123456789abcdef")
    gone = r"0123456789abcdef, the copy of the code(.|\n)*--code current"
    with pytest.raises(ConfigError, match=gone):
        resume_command.main([run.name])
    RunDir(run).update(code=before.get("code"))
    config = load(run / "config.yaml")
    config.train.from_scratch = True  # the run was once started with this key
    RunDir.open(run).freeze(dump(config))
    (run / "checkpoints").rename(tmp_path / "gone")
    assert "train.from_scratch=true" in resume(run.name, code=6).stderr
    (tmp_path / "gone").rename(run / "checkpoints")
    # It goes on here on demand, although there is a Slurm.
    (tmp_path / "sbatch").write_text(f"#!/bin/sh\ntouch {tmp_path}/asked\nexit 1\n")
    (tmp_path / "sbatch").chmod(0o755)
    here = "hydra/launcher=submitit_local"
    no_sbatch["PATH"] = f"{tmp_path}:{no_sbatch['PATH']}"
    told = resume("train.log_every=5", "launch.tasks_per_node=2", here, "--json").stdout
    assert not (tmp_path / "asked").exists()
    assert [entry["state"] for entry in json.loads(told)] == ["finished"]
    after = run_json(run)
    assert (after["state"], after["uid"]) == ("finished", before["uid"])
    assert [attempt["world_size"] for attempt in after["attempts"]] == [1, 2]
    capsys.readouterr()
    assert resume_command.main([run.name]) == 0
    assert "digits" in capsys.readouterr().out
    assert len(run_json(run)["attempts"]) == 2
    # Only the user can read what all these commands have written.
    assert {p: rights(p) for p in [run, *run.rglob("*")] if rights(p) & 0o077} == {}
    assert rights(run.parent) == 0o700


def rights(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


def test_runs_are_private_unless_told_otherwise(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test above has a run that is private."""
    train("train.max_steps=1", "tracking=off", "output_dir=shared", HPCTRAIN_UMASK="027")
    shared = tmp_path / "shared"
    assert {rights(path) & 0o027 for path in shared.rglob("*")} == {0}
    assert rights(shared) == 0o750
    monkeypatch.setenv("HPCTRAIN_UMASK", "777")
    with pytest.raises(ConfigError, match="HPCTRAIN_UMASK=777: an octal number"):
        disk.umask()


@pytest.mark.slurm
@pytest.mark.slow
def test_failed_runs_keep_their_code_unless_todays_is_asked_for(
    digits: Path, tmp_path: Path, empty_queue: None
) -> None:
    project = tmp_path / "project"
    project.mkdir()
    (project / "my_net.py").write_text(NET.replace("64, 10", "63, 10"))
    subprocess.run(["git", "init", "-q", "."], cwd=project, check=True)

    def hpctrain(*arguments: str, code: int = 0) -> Completed:
        return run_module("hpctrain", *arguments, code=code, cwd=project)

    where = [f"data.path={digits}", f"output_dir={tmp_path}/runs", "tracking=off"]
    given = ["model._target_=my_net.Net", "train.max_steps=3", "seed=1"]
    hpctrain("-m", "experiment=digits", *where, *given, "launch.wait=true", code=4)
    assert {run_json(run)["state"] for run in runs(tmp_path / "runs")} == {"failed"}
    first = {run_json(run)["code"] for run in runs(tmp_path / "runs")}
    (project / "my_net.py").write_text(NET)
    (sweep,) = (tmp_path / "runs" / "sweeps").iterdir()
    hpctrain("resume", "--dir", f"{tmp_path}/runs", sweep.name)
    assert set(cluster.wait_for_end(cluster.job_ids(tmp_path / "runs")).values()) == {"FAILED"}
    assert {run_json(run)["code"] for run in runs(tmp_path / "runs")} == first
    hpctrain("resume", "--dir", f"{tmp_path}/runs", "--code", "current", "launch.time_min=5")
    assert set(cluster.wait_for_end(cluster.job_ids(tmp_path / "runs")).values()) == {"COMPLETED"}
    assert {run_json(run)["state"] for run in runs(tmp_path / "runs")} == {"finished"}
    assert not {run_json(run)["code"] for run in runs(tmp_path / "runs")} & first
    assert os.path.isdir(runs(tmp_path / "runs")[0] / "provenance")
