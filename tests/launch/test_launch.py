"""Submission without a cluster: dry runs, refusals and submitit's local executor."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from hpctrain import cli
from hpctrain.cluster.slurm import sbatch
from hpctrain.cluster.slurm.job_environment import keep_gpus, take_kept_gpus
from hpctrain.config.frozen import load
from hpctrain.config.job_request import JobRequest
from hpctrain.config.schema import Config
from hpctrain.engine.faults import early_signals
from hpctrain.engine.job import here
from hpctrain.errors import ConfigError
from hpctrain.launch.sweeps.before_queueing import check_here
from tests.conftest import NET, Completed, run_json, runs

Train = Callable[..., Completed]


def test_dry_run_prints_the_script_and_leaves_nothing(train: Train, tmp_path: Path) -> None:
    done = train("-m", "optimizer.lr=1e-3,2e-3", "launch.dry_run=true")
    assert "#SBATCH --array=0-1\n" in done.stdout
    assert not (tmp_path / "runs").exists()


def test_one_wrong_run_stops_the_sweep_and_all_are_told(train: Train, tmp_path: Path) -> None:
    done = train("-m", "optimizer.lr=1e-3,-1,abc", "seed=0,-5", code=2, new=True)
    assert "5 of 6 runs are wrong; nothing was queued" in done.stderr
    for problem in ("optimizer.lr=-1.0: it must", "optimizer.lr=abc: it must", "seed=-5: it must"):
        assert done.stderr.count(problem) == 1
    assert not (tmp_path / "runs").exists()
    assert "Traceback" not in done.stderr


def test_more_nodes_than_this_one_need_a_cluster(
    train: Train, tmp_path: Path, no_sbatch: dict[str, str]
) -> None:
    done = train("-m", "seed=1,2", "launch.nodes=2", code=2, **no_sbatch)
    assert "launch.nodes=2: sbatch is not on the PATH" in done.stderr
    assert not (tmp_path / "runs").exists()


def test_the_local_launcher_refuses_more_nodes_where_there_is_a_cluster(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sbatch, "available", lambda: True)
    config = Config()
    config.launch.nodes = 2
    with pytest.raises(ConfigError, match=r"nodes=2: with hydra/launcher=submitit_local a run has"):
        check_here(JobRequest.of(config))


def test_without_sbatch_the_sweep_runs_here(
    train: Train, tmp_path: Path, no_sbatch: dict[str, str]
) -> None:
    common = ("-m", "train.max_steps=3", "tracking=off", "launch.tasks_per_node=2")
    common += ("launch.snapshot=auto",)
    done = train(*common, "optimizer.lr=1e-3", **no_sbatch)
    assert "sbatch is not on the PATH" in done.stderr
    assert "submitit's local executor" in done.stderr
    (run,) = runs(tmp_path / "runs")
    assert run_json(run)["state"] == "finished"
    attempt = run_json(run)["attempts"][-1]
    assert (attempt["launcher"], attempt["world_size"]) == ("submitit-local", 2)
    assert (tmp_path / "runs" / "code" / run_json(run)["code"]).is_dir()  # `gc` keeps it
    (run / "config.yaml").unlink()  # as by a site that deletes what is old
    # With one more value only its run is started. It fails, so the command fails and names it.
    more = ("optimizer.lr=1e-3", "model.in_features=64,3", "launch.tasks_per_node=1")
    done = train(*common, *more, code=4, **no_sbatch)
    assert done.stderr.count("finished before") == 1
    assert "not finished: see" in done.stderr
    assert f"{run}/config.yaml was missing or damaged, and is written again" in done.stderr
    assert load(run / "config.yaml").train.max_steps == 3


@pytest.mark.parametrize("mask", [None, "", "2,3"])
def test_the_ranks_of_a_run_here_see_the_gpus_of_the_command(
    mask: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = {} if mask is None else {"CUDA_VISIBLE_DEVICES": mask}
    keep_gpus(environment)
    # submitit's local executor does this; torch would then see no GPU, or those of others.
    environment["CUDA_VISIBLE_DEVICES"] = ""
    seen = []
    monkeypatch.setattr(os, "environ", environment)
    monkeypatch.setattr(take_kept_gpus, "__defaults__", (environment,))
    monkeypatch.setattr(early_signals, "note", lambda: None)
    monkeypatch.setattr(
        here, "train_frozen", lambda path, until: seen.append(dict(environment)) or 0
    )
    assert cli._dispatch(["run", "a run"]) == 0
    assert seen == [{} if mask is None else {"CUDA_VISIBLE_DEVICES": mask}]
    # A rank that Slurm or torchrun has started keeps its own.
    environment["CUDA_VISIBLE_DEVICES"] = "7"
    cli._dispatch(["run", "a run"])
    assert seen[1] == {"CUDA_VISIBLE_DEVICES": "7"}


@pytest.mark.slow
@pytest.mark.parametrize(("known_to_git", "new"), [(True, False), (True, True), (False, False)])
def test_code_beside_the_command_is_found_whether_git_knows_it_or_not(
    train: Train, tmp_path: Path, known_to_git: bool, new: bool
) -> None:
    (tmp_path / "my_net.py").write_text(NET)
    path = tmp_path / "bin"
    path.mkdir()
    (path / "git").symlink_to(shutil.which("git") or "")
    if known_to_git:
        subprocess.run(["git", "init", "-q", "."], cwd=tmp_path, check=True)
    size = ("train.max_steps=2", "tracking=off", "output_dir=.", "launch.snapshot=auto")
    # A new Python starts the ranks as for users, not as forks; so do the jobs of the cluster tests.
    given = ("model._target_=my_net.Net", *size)
    done = train("-m", *given, new=new, PATH=str(path))
    assert ("not copied, because it is in no git repository" in done.stderr) != known_to_git
    (run,) = runs(tmp_path)
    assert run_json(run)["state"] == "finished"
    copies = list(tmp_path.glob("code/*/*/my_net.py"))
    assert len(copies) == known_to_git


def test_the_login_node_imports_neither_torch_nor_mlflow(digits: Path, tmp_path: Path) -> None:
    program = (
        "import json, sys; from hpctrain.cli import main\n"
        "for words in json.loads(sys.argv[1]):\n"
        "    sys.argv[1:] = words\n"
        "    try: main()\n"
        "    except SystemExit as end: code = end.code\n"
        "    heavy = {'torch', 'mlflow', 'h5py'} & set(sys.modules)\n"
        "    if heavy or code: sys.exit(f'{words} imported {heavy}' if heavy else code)\n"
    )
    where = [f"data.path={digits}", f"output_dir={tmp_path}/runs"]
    helps = ("status", "logs", "cancel", "resume", "gc")
    for commands in (
        [["-m", "experiment=digits", "seed=1,2", "launch.dry_run=true", *where]],
        [["freeze", "experiment=digits", *where]],
        # What one of these would import is found in the same process.
        [
            ["doctor", "--env", "--json"],
            ["--help", "all"],
            *([*name.split(), "--help"] for name in helps),
        ],
    ):
        done = subprocess.run(
            [sys.executable, "-c", program, json.dumps(commands)], capture_output=True, text=True
        )
        assert done.returncode == 0, (commands, done.stderr)
        assert "Traceback" not in done.stderr
