"""hpctrain works with the pre-releases of Hydra 1.4. All other tests use the stable release."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import cluster
from tests.conftest import Completed, run_json, run_module, runs

pytestmark = pytest.mark.slow
Train = Callable[..., Completed]
# Hydra 1.4 needs omegaconf 2.4, which contains its own antlr.
VERSIONS = ("hydra-core==1.4.0rc3", "hydra-submitit-launcher==1.4.0rc3", "omegaconf==2.4.1rc1")


@pytest.fixture(scope="session")
def hydra_1_4(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Environment variables with which Python imports the pre-releases first."""
    folder = tmp_path_factory.mktemp("hydra-1.4")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder)]
    done = subprocess.run([*pip, *VERSIONS], capture_output=True, text=True, check=False)
    if done.returncode:
        said = done.stderr.strip().splitlines()[-1:]
        pytest.skip(f"HYDRA 1.4 IS NOT TESTED: pip cannot install {' '.join(VERSIONS)}: {said}")
    found = filter(None, (str(folder), os.environ.get("PYTHONPATH")))
    env = {"PYTHONPATH": os.pathsep.join(found)}
    program = "import hydra, omegaconf; print(hydra.__version__, omegaconf.__version__)"
    version = subprocess.run(
        [sys.executable, "-c", program], env=os.environ | env, capture_output=True, text=True
    )
    assert version.stdout.split() == ["1.4.0rc3", "2.4.1rc1"], version.stderr
    return env


@pytest.fixture
def train_1_4(train: Train, hydra_1_4: dict[str, str]) -> Train:
    """The function `train` with Hydra 1.4; it also requires that there is no warning."""

    def call(*arguments: str, code: int = 0, **env: str) -> Completed:
        done = train(*arguments, code=code, **hydra_1_4 | env)
        assert "Warning" not in done.stderr
        return done

    return call


def test_help_and_the_composed_config(train_1_4: Train, hydra_1_4: dict[str, str]) -> None:
    assert "experiment   digits" in run_module("hpctrain", "--help", **hydra_1_4).stdout
    assert "\nname: digits\n" in "\n" + train_1_4("--cfg", "job").stdout


def test_training_here(train_1_4: Train, tmp_path: Path) -> None:
    train_1_4("train.max_steps=2", "tracking=off")
    (run,) = runs(tmp_path / "runs")
    assert run_json(run)["result"]["step"] == 2


def test_both_versions_name_a_run_alike(train: Train, train_1_4: Train, tmp_path: Path) -> None:
    train("train.max_steps=2", "tracking=off")
    assert "is finished already" in train_1_4("train.max_steps=2", "tracking=off").stdout


def test_dry_run(train_1_4: Train, tmp_path: Path) -> None:
    done = train_1_4("-m", "optimizer.lr=1e-3,2e-3", "scheduler=glob(co*)", "launch.dry_run=true")
    assert "#SBATCH --array=0-3" in done.stdout
    assert not (tmp_path / "runs").exists()


def test_a_sweep_here(train_1_4: Train, tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    common = ("-m", "train.max_steps=2", "tracking=off", "launch.snapshot=off")
    done = train_1_4(*common, "seed=1,2", PATH=str(tmp_path / "bin"))
    assert "submitit's local executor" in done.stderr
    assert [run_json(run)["state"] for run in runs(tmp_path / "runs")] == ["finished"] * 2


def test_submitits_keys_and_a_call_from_python(
    train_1_4: Train, digits: Path, tmp_path: Path, hydra_1_4: dict[str, str]
) -> None:
    (tmp_path / "bin").mkdir()
    keys = ("hydra/launcher=submitit_slurm", "hydra.launcher.timeout_min=7", "launch.dry_run=true")
    done = train_1_4("-m", *keys, "launch.snapshot=off", PATH=str(tmp_path / "bin"))
    assert "hydra.launcher.timeout_min=7 is read as launch.time_min=7" in done.stderr
    assert "#SBATCH --time=7\n" in done.stdout
    given = ["experiment=digits", "seed=1,2", f"data.path={digits}", "launch.snapshot=off", *keys]
    (tmp_path / "calls.py").write_text(f"import hpctrain\nprint(hpctrain.submit(*{given}))\n")
    path = {"PATH": str(tmp_path / "bin")}
    done = run_module("calls", cwd=tmp_path, **hydra_1_4 | path)
    assert "#SBATCH --time=7\n" in done.stdout
    assert done.stdout.endswith("[]\n")
    assert "Warning" not in done.stderr


def test_a_search(train_1_4: Train, tmp_path: Path) -> None:
    sweeper = ("hydra/sweeper=optuna", "hydra.sweeper.direction=maximize")
    done = train_1_4("-m", *sweeper, "optimizer.lr=interval(0.1,1)", "launch.dry_run=true")
    assert "#SBATCH --array=0-1" in done.stdout
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("optimizer.lrr=1", "unknown key optimizer.lrr: did you mean optimizer.lr"),
        ("+train.stepz=1", "unknown key train.stepz: did you mean train.max_steps"),
        ("optimizer.lr=abc", "optimizer.lr=abc: it must be of type float"),
        ("optimizer=adamx", "optimizer=adamx: no such choice; there are: adamw, sgd"),
        ("optimizer.lr=[", "optimizer.lr=[: not of the form KEY=VALUE"),
        ("model._target_=hpctrain.models.None", "model._target_=hpctrain.models.None"),
    ],
)
def test_errors_stay_short(train_1_4: Train, override: str, message: str) -> None:
    done = train_1_4(override, "tracking=off", code=2)
    assert f"error: {message}" in done.stderr
    assert "Traceback" not in done.stderr


def test_what_is_wrong_in_a_sweep_is_told(train_1_4: Train, tmp_path: Path) -> None:
    done = train_1_4("-m", "optimizer.lr=1e-3,-1,abc", "seed=0,-5", code=2)
    assert "5 of 6 runs are wrong; nothing was queued" in done.stderr
    assert not (tmp_path / "runs").exists()


@pytest.mark.slurm
def test_a_sweep_on_the_cluster(train_1_4: Train, tmp_path: Path) -> None:
    cluster.require()
    shape = ("launch.tasks_per_node=2", "launch.wait=true")
    train_1_4("-m", "train.max_steps=3", "optimizer.lr=1e-3,3e-3", *shape)
    records = [run_json(run) for run in runs(tmp_path / "runs")]
    assert [record["state"] for record in records] == ["finished"] * 2
    assert {record["attempts"][-1]["world_size"] for record in records} == {2}
