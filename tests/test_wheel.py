"""A wheel that is installed elsewhere has all its parts: configs, launcher and type marker."""

import os
import re
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest
import yaml

from tests import cluster
from tests.conftest import ROOT, run_json, runs
from tests.test_docs import blocks, commands


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
    done = run([str(python), *arguments], folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def run(command: list[str], folder: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """Run a command in a folder, as somebody who knows neither the checkout nor this pytest."""
    here = re.compile("PYTHONPATH|PYTEST_|SLURM_CONF|CI$")
    env = {name: value for name, value in os.environ.items() if not here.match(name)} | env
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)


def test_it_carries_everything(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    for name in (
        "hpctrain/py.typed",
        "hpctrain/addons/node/environment.sh",
        "hpctrain/base/gone.yaml",
        "hpctrain/base/offered.pyi",
        "hpctrain/conf/config.yaml",
        "hpctrain/conf/experiment/digits.yaml",
        "hydra_plugins/hpctrain_launcher.py",
        "hydra_plugins/hpctrain_optuna_sweeper.py",
        "hpctrain/slurm/train.sbatch",
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


(INSTALL,) = [line for line in commands(ROOT / "docs" / "start.md") if "apt-get" in line]
PAGE = {block.title: block.text for block in blocks(ROOT / "docs" / "start.md")}


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project outside the checkout, with the tests that the page shows."""
    for name in ("conftest.py", "test_sweep.py"):
        (tmp_path / name).write_text(PAGE[name])
    (tmp_path / "test_where.py").write_text("def test(slurm_cluster): print(slurm_cluster('env'))")
    return tmp_path


PYTEST = ["-m", "pytest", "-rsx", "-s", "-p", "no:cacheprovider"]
ALONE = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}


@pytest.mark.parametrize(("ci", "outcome"), [("", "2 skipped"), ("true", "2 errors")])
def test_without_slurm_a_project_learns_what_to_install(
    ci: str, outcome: str, python: Path, project: Path
) -> None:
    missing = "apt-get install --no-install-recommends slurmctld slurmd"
    checked = run([str(python), "-m", "hpctrain", "cluster", "check"], project, PATH="/nowhere")
    assert checked.returncode == 3
    assert checked.stderr.startswith("python -m hpctrain cluster: missing: slurmctld")
    assert missing in checked.stderr
    done = run([str(python), *PYTEST], project, PATH="/nowhere", CI=ci, **ALONE)
    assert done.returncode == (1 if ci else 0)
    assert outcome in done.stdout
    assert missing in done.stdout


@pytest.mark.slurm
def test_a_project_submits_a_sweep_to_a_cluster_of_its_own(
    python: Path, project: Path, digits: Path
) -> None:
    (project / "data").mkdir()
    (project / "data" / "digits").symlink_to(digits)
    done = run([str(python), *PYTEST], project, **ALONE)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 passed" in done.stdout
    assert [run_json(path)["state"] for path in runs(project / "runs")] == ["finished"] * 2
    (conf,) = re.findall("export SLURM_CONF=(.*)", done.stdout)
    assert not Path(conf).parent.exists()


@pytest.mark.slurm
@pytest.mark.slow
def test_the_job_of_github_actions_and_a_preemption(python: Path, tmp_path: Path) -> None:
    job = yaml.safe_load(PAGE[".github/workflows/slurm.yml"])["jobs"]["slurm"]
    apt, pip, *steps = [step["run"] for step in job["steps"] if "run" in step]
    assert apt.partition(" slurmctld")[2] == INSTALL.partition(" slurmctld")[2]
    assert pip.startswith("pip install")
    # Each step is a new shell there, and root does not own the folder.
    os.chown(tmp_path, 1001, 1001)
    folder = f"/var/tmp/hpctrain-test-wheel-{cluster.number()}"
    env = {
        cluster.SETTING: f"{folder}:10.78.{cluster.number()}.0/24",
        "PATH": f"{python.parent}:{os.environ['PATH']}",
        "CI": "true",
    }

    def shell(text: str) -> str:
        done = run(["sh", "-ec", text], tmp_path, **env)
        assert done.returncode == 0, f"{text}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    try:
        for step in steps:
            shell(step)
        assert [run_json(path)["state"] for path in runs(tmp_path / "runs")] == ["finished"] * 2
        env["SLURM_CONF"] = f"{folder}/slurm.conf"
        sleeping = shell("sbatch --parsable -p preemptible -o /dev/null --wrap 'sleep 99'").strip()
        state = f"squeue -h -j {sleeping} -o %T"
        cluster.wait_for(lambda: shell(state) == "RUNNING\n", 60, "the job runs")
        assert f"from job {sleeping}" in shell(f"python -m hpctrain cluster preempt {sleeping}")
        assert shell("python -m hpctrain cluster cut node2") == "cut node2: done\n"
    finally:
        shell("python -m hpctrain cluster down")
    assert not Path(folder).exists()
