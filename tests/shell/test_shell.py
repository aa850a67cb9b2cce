"""`shell` without a cluster: what is refused, and what Slurm is asked for."""

import os
import sys
from pathlib import Path

import pytest

from hpctrain import cli
from hpctrain.addons.node import environment
from hpctrain.errors import ConfigError, LaunchError
from hpctrain.insight.shell import tools
from tests.conftest import only_run, run_module

# The commands of Slurm write their words and the lines of the environment into a file.
RECORDED = """\
#!{python}
import json, os, sys
line = [os.path.basename(sys.argv[0]), *sys.argv[1:], os.environ.get("HPCTRAIN_SHELL", "")]
open({file!r}, "a").write(json.dumps(line) + "\\n")
"""


@pytest.fixture
def recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file with what salloc and srun were called with; each is a stand-in."""
    folder, file = tmp_path / "bin", tmp_path / "calls"
    folder.mkdir()
    for name in ("salloc", "srun", "sbatch", "scontrol", "sinfo", "squeue"):
        (folder / name).write_text(RECORDED.format(python=sys.executable, file=str(file)))
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=":")
    return file


def refused(*arguments: str) -> str:
    with pytest.raises(ConfigError) as caught:
        cli._dispatch(["shell", *arguments])
    return str(caught.value)


def frozen(digits: Path, tmp_path: Path, *words: str) -> str:
    where = (f"data.path={digits}", f"output_dir={tmp_path}/runs")
    run_module("hpctrain", "freeze", "experiment=digits", *where, *words)
    return str(only_run(tmp_path))


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([], "shell needs a terminal"),
        (["a", "b"], "a b: shell takes one RUN"),
        (["--debug", "--jupyter"], "--debug and --jupyter: give one of them"),
        (["--rank", "1"], "--rank 1: it says which rank waits with --debug"),
        (["--debug", "--rank", "some"], "--rank some: the number of a rank, or all"),
        (["seed=1,2", "--debug"], "seed=1,2: 2 runs; --debug takes one"),
    ],
)
def test_refused_before_slurm_is_asked(recorded: Path, arguments: list[str], text: str) -> None:
    assert refused(*arguments).startswith(text)
    assert not recorded.exists()


@pytest.mark.parametrize("name", ["debug", "notebook"])
def test_a_library_that_is_not_there_is_named_with_its_pip_line(
    recorded: Path, name: str, digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tools, "find_spec", lambda module: None)
    option = {"debug": "--debug", "notebook": "--jupyter"}[name]
    told = refused(frozen(digits, tmp_path), option)
    assert told.startswith(f"{option}: ")
    assert f"is not installed here: pip install 'hpctrain[{name}]'" in told
    assert not recorded.exists() or "salloc" not in recorded.read_text()


def test_what_a_run_does_not_take(recorded: Path, digits: Path, tmp_path: Path) -> None:
    run = frozen(digits, tmp_path)
    told = refused(run, "--jupyter", "optimizer.lr=1")
    assert told == "optimizer.lr=1: a run has its config; shell takes launch.* and site.*"


def test_without_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(LaunchError, match="srun and salloc are not on the PATH"):
        cli._dispatch(["shell", "--jupyter"])


@pytest.mark.parametrize("runtime", ["apptainer", "pyxis"])
def test_in_the_container_of_the_run(
    recorded: Path, digits: Path, tmp_path: Path, runtime: str
) -> None:
    """The lines of the site run outside of it, as in a batch script: with pyxis before srun."""
    site = (f"site.container.runtime={runtime}", "site.container.image=mine.sif")
    run = frozen(digits, tmp_path, *site, "site.modules=[gcc]", "launch.gpus_per_node=1")
    run_module("hpctrain", "shell", run, "--jupyter", PATH=os.environ["PATH"])
    (call,) = [line for line in recorded.read_text().splitlines() if '["salloc' in line]
    assert "module load gcc" in call
    assert '"--gpus-per-node=1"' in call
    assert '"--time=60"' in call
    words = call.split('"srun"')
    assert len(words) == 2
    assert ("HPCTRAIN_SHELL" in words[0]) == (runtime == "pyxis")
    if runtime == "pyxis":
        assert '"--container-image=mine.sif"' in words[1]
    else:
        assert 'exec apptainer exec \\"$container_gpus\\" --bind=' in words[1]
    assert "hpctrain.insight.shell.notebook" in words[1]


def test_debug_of_what_was_never_trained_freezes_it_first(
    recorded: Path, digits: Path, tmp_path: Path
) -> None:
    where = (f"data.path={digits}", f"output_dir={tmp_path}/runs", "launch.tasks_per_node=2")
    asked = ("shell", "--debug", "experiment=digits", *where, "launch.time_min=9")
    run_module("hpctrain", *asked, PATH=os.environ["PATH"])
    (call,) = [line for line in recorded.read_text().splitlines() if '["salloc' in line]
    run = only_run(tmp_path)
    assert f"hpctrain.insight.shell.debug {run} first 0" in call
    assert '"--time=9"' in call
    assert '"--ntasks=2"' in call


def test_the_environment_of_a_run_that_travels(
    recorded: Path, digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = frozen(digits, tmp_path, "launch.environment=image")
    packed: list[Path] = []
    monkeypatch.setattr(environment, "write", lambda image, code: packed.append(image))
    monkeypatch.setattr(environment, "_digest", lambda: "1")
    cli._dispatch(["shell", run, "--debug"])
    assert packed == [tmp_path / "runs/environments/1.tar"]
    (call,) = [line for line in recorded.read_text().splitlines() if '["salloc' in line]
    assert f"exec bash {environment.SHELL} {packed[0]} '' {sys.executable} -u" in call
