"""A wheel that is installed elsewhere has all its parts: configs, launcher and type marker."""

import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

from tests.conftest import ROOT, run_json, runs


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder)]
    done = subprocess.run([*command, str(ROOT)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (wheel,) = folder.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment that has the wheel and, by a path, its dependencies."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    target = next((folder / "lib").glob("python*")) / "site-packages"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(target)]
    subprocess.run([*pip, str(wheel)], check=True)
    # A folder that a .pth file adds is searched, but its own .pth files are not read. So the
    # editable install there has no effect.
    (target / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python


def call(python: Path, folder: Path, *arguments: str) -> str:
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [str(python), *arguments], cwd=folder, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_it_carries_everything(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    for name in (
        "hpctrain/py.typed",
        "hpctrain/conf/config.yaml",
        "hpctrain/conf/experiment/digits.yaml",
        "hydra_plugins/hpctrain_launcher.py",
        "hydra_plugins/hpctrain_optuna_sweeper.py",
        "data_prep/__main__.py",
    ):
        assert name in names
    assert not [name for name in names if "plugin/" in name or name.startswith("tests")]


def test_it_trains_outside_the_checkout(python: Path, digits: Path, tmp_path: Path) -> None:
    where = call(python, tmp_path, "-c", "import hpctrain; print(hpctrain.__file__)")
    assert not Path(where.strip()).is_relative_to(ROOT)
    assert "digits" in call(python, tmp_path, "-m", "hpctrain", "--help")
    given = ["experiment=digits", f"data.path={digits}", "train.max_steps=2", "tracking=off"]
    call(python, tmp_path, "-m", "hpctrain", *given)
    (run,) = runs(tmp_path / "runs")
    assert run_json(run)["result"]["step"] == 2
    script = call(python, tmp_path, "-m", "hpctrain", "-m", *given, "launch.dry_run=true")
    assert str(python) in script


def test_submitit_knows_its_executor(python: Path, tmp_path: Path) -> None:
    known = "print(*p.get_executors(), *p.get_job_environments())"
    known = f"from submitit.core import plugins as p; {known}"
    assert call(python, tmp_path, "-c", known).split().count("hpctrain") == 2


def test_the_command_is_installed_as_hpctrain_too() -> None:
    command = Path(sysconfig.get_path("scripts")) / "hpctrain"
    done = subprocess.run([command, "--help"], capture_output=True, text=True, check=True)
    assert "experiment=digits" in done.stdout
