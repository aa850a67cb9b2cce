"""A run of somebody else runs no code before its user says so."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hpctrain.cluster.slurm.job_environment import TRUST
from hpctrain.commands import resume
from hpctrain.config.frozen import dump, executed, load
from hpctrain.config.schema import Config
from hpctrain.engine.job.here import train_frozen
from hpctrain.errors import ConfigError
from hpctrain.results.commands.branch import branch
from hpctrain.results.loaded import LoadedRun
from hpctrain.results.text_generation import Generator
from hpctrain.runs import trust
from hpctrain.runs.freeze import freeze
from hpctrain.runs.run_dir import RunDir
from tests.conftest import run_module

STRANGER = 65534
pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a run away")
USES: dict[str, Callable[[Path], Any]] = {
    "run": train_frozen,
    "evaluate": lambda run: LoadedRun(run).evaluate(),
    "predict": lambda run: LoadedRun(run).predict(None, run / "out"),
    "model": lambda run: LoadedRun(run).model(),
    "export": lambda run: LoadedRun(run).find_code("export"),
    "generate": Generator.of,
    "resume": lambda run: resume.main([run.name, "--dir", str(run.parent)]),
    "branch": lambda run: branch(run, ["train.max_steps=9"]),
    "train": lambda run: freeze(load(run / "config.yaml"), RunDir.open(run)),
}


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    monkeypatch.setenv(TRUST, "")
    config = Config()
    config.output_dir = str(tmp_path)
    config.data.path, config.tracking.enabled = "/data", False
    config.model = {"_target_": "theirs.Model", "inner": [{"_target_": "os.system"}]}
    run = RunDir(tmp_path / "run-00000001", "digest")
    run.freeze(dump(config), code="0123456789abcdef")
    run.update(state="interrupted")
    return run


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("given", ["run", "config.yaml"])
def test_the_code_of_a_stranger_waits_for_a_word(run: RunDir, use: str, given: str) -> None:
    os.chown(run.path if given == "run" else run.path / given, STRANGER, -1)
    before = (run.path / "run.json").read_bytes()
    with pytest.raises(ConfigError) as caught:
        USES[use](run.path)
    text = str(caught.value)
    assert f"{run.path} belongs to nobody (uid {STRANGER})" in text
    assert "_target_ theirs.Model, os.system" in text
    assert text.endswith(f"--trust nobody or {TRUST}=nobody")
    assert (run.path / "run.json").read_bytes() == before


@pytest.mark.parametrize("word", ["nobody", str(STRANGER), f"somebody,{STRANGER}"])
def test_who_is_trusted_is_said(run: RunDir, caplog: pytest.LogCaptureFixture, word: str) -> None:
    copy = run.path.parent / "code" / "0123456789abcdef"
    copy.mkdir(parents=True)
    os.chown(copy, STRANGER, -1)
    config = load(run.config_file)
    with pytest.raises(ConfigError, match=f"the code in {copy}"):
        trust.check(run.path, executed(config), run.code_copy)
    trust.check(run.path, executed(config))
    trust.accept(word)
    trust.check(run.path, executed(config), run.code_copy)
    assert f"belongs to nobody (uid {STRANGER}), and this runs with your rights" in caplog.text


def test_the_command_line_has_the_flag(run: RunDir) -> None:
    os.chown(run.path, STRANGER, -1)
    path = str(run.path)
    said = run_module("hpctrain", "run", "--trust", "nobody", path, code=2).stderr
    assert "belongs to nobody" in said
    assert "If you trust them" not in said
