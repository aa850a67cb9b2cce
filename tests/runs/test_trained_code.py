"""A run whose code has changed says so before it goes on."""

import importlib
import json
import logging
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import distributed
from torch.distributed.checkpoint.metadata import TensorProperties, TensorStorageMetadata

from hpctrain.config.identity import run_path
from hpctrain.config.schema import Config
from hpctrain.engine.checkpoint.tensor_reader import misfit
from hpctrain.runs.checkpoints.manifest import digest
from hpctrain.runs.code import trained_code
from hpctrain.runs.freeze import freeze
from hpctrain.runs.run_dir import RunDir
from tests.conftest import Completed, run_json, run_module, runs
from tests.ranks import run_ranks

# With STOP its sixth training call fails.
NET = """\
import os
import torch
from helper import pool

class Net(torch.nn.Module):
    calls = 0

    def __init__(self, **_):
        super().__init__()
        self.first = torch.nn.Linear(8, 16)
        self.last = torch.nn.Linear(16, 10)

    def forward(self, image):
        self.calls += 1
        if "STOP" in os.environ and self.calls > 5:
            raise RuntimeError("stopped")
        return self.last(pool(self.first(image.float().view(-1, 8, 8)).relu()))
"""
HELPER = "def pool(x):\n    return x.mean(1)\n"
SIZE = ("train.max_steps=8", "checkpoint.every_steps=2", "train.eval_every=100", "tracking=off")
OWN = ("model._target_=net.Net", *SIZE)
CHANGED = "helper.py has changed"


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "net.py").write_text(NET)
    (tmp_path / "helper.py").write_text(HELPER)
    before = {*sys.modules}
    yield tmp_path
    for name in {*sys.modules} - before:
        del sys.modules[name]


def edit(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))


def test_the_modules_that_were_imported_are_known(project: Path) -> None:
    (project / "plugins" / "deep").mkdir(parents=True)
    (project / "plugins" / "unused.py").write_text("")
    (project / "plugins" / "__init__.py").write_text("from .deep import inner\n")
    (project / "plugins" / "deep" / "inner.py").write_text("import json, helper\n")
    before = {*sys.modules}
    importlib.import_module("plugins")
    found = trained_code.loaded(before)
    assert [*found] == ["helper.py", "plugins/__init__.py", "plugins/deep/inner.py"]
    assert found["helper.py"] == digest(project / "helper.py")
    packaged = trained_code.loaded({*sys.modules}, {"plugins"})
    assert [*packaged] == ["plugins/__init__.py", "plugins/deep/inner.py"]


def trained(folder: Path) -> tuple[Config, RunDir]:
    """Return a run of `net.Net` whose first attempt has saved step 4."""
    config = Config(name="digits", output_dir=str(folder / "runs"), model={"_target_": "net.Net"})
    config.data.path = "/data"
    run = RunDir(run_path(config, "digest"), "digest")
    freeze(config, run)
    run.begin_attempt(first_step=0)
    known = {*sys.modules}
    importlib.import_module("net")
    trained_code.record(run, ["net.Net"], known)
    (run.checkpoints / "step-00000004").mkdir()
    run.end_attempt("interrupted", step=4)
    return config, run


def test_the_code_is_that_of_the_last_training(project: Path) -> None:
    _, run = trained(project)
    assert trained_code.changes(run) == ""
    edit(project / "helper.py", "mean", "amax")
    assert trained_code.changes(run) == CHANGED
    copy = project / "copy"
    copy.mkdir()
    (copy / "net.py").write_text(NET)
    assert trained_code.changes(run, [copy]) == "helper.py is gone", "where a job imports from"
    (copy / "helper.py").write_text(HELPER)
    assert trained_code.changes(run, [copy]) == ""
    run.begin_attempt(first_step=4, code_changed=CHANGED)
    trained_code.record(run, ["net.Net"], {*sys.modules} - {"helper"})
    assert trained_code.changes(run) == ""
    assert trained_code.turning_points(run.read()) == {4: CHANGED}
    # A branch of it has this code, too.
    config = Config(name="digits", output_dir=str(project / "runs"), seed=1)
    child = RunDir(run_path(config, "digest"), "digest")
    freeze(config, child)
    trained_code.inherit(run, child)
    (child.checkpoints / "step-00000004").mkdir(parents=True)
    assert trained_code.changes(child) == ""
    edit(project / "helper.py", "amax", "sum")
    assert trained_code.changes(child) == trained_code.changes(run) == CHANGED
    # What 0.2.0 has written has the texts of the modules; nothing is said of it, nor of damage.
    old = '{"version": 1, "records": [{"attempt": 1, "modules": {"a": {"file": "a", "text": ""}}}]}'
    for text in ("{", '{"version": 1, "digests": []}', old):
        (run.path / "modules.json").write_text(text)
        assert trained_code.changes(run) == ""


@pytest.mark.parametrize("why", ["changed", "misfit", "has gone on"])
def test_from_scratch_keeps_the_directory_and_starts_again_once(
    project: Path, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    config, run = trained(project)
    config.train.from_scratch = True
    freeze(config, run)
    assert (run.checkpoints / "step-00000004").exists(), "it goes on, as nothing has changed"
    if why == "changed":
        edit(project / "helper.py", "mean", "amax")
    else:
        facts = {"misfit": True} if why == "misfit" else {"code_changed": CHANGED}
        run.begin_attempt(first_step=4)
        run.end_attempt("failed", **facts)
    uid = run.read().uid
    config.train.from_scratch = False
    freeze(config, run)
    assert run.read().uid == uid
    config.train.from_scratch = True
    with caplog.at_level(logging.WARNING):
        freeze(config, run)
        freeze(config, run)
    assert caplog.text.count("is kept under another name") == 1
    kept = Path(f"{run.path}.1")
    assert (kept / "checkpoints" / "step-00000004").exists()
    assert (run_json(kept)["uid"], run.read().attempts) == (uid, ())


def test_the_same_command_after_an_edit_says_it_and_goes_on_if_it_can(
    train: Callable[..., Completed], project: Path
) -> None:
    train(*OWN, code=1, STOP="yes")
    (run,) = runs(project / "runs")
    # Other names and shapes are an error.
    edit(project / "net.py", "16, 10)", "16, 10, bias=False)")
    more = "Linear(8, 16)\n        self.more = torch.nn.Linear(2, 2, bias=False)"
    edit(project / "net.py", "Linear(8, 16)", more)
    done = train(*OWN, code=2)
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"error: {run}/checkpoints/step-00000004 does not fit the model: ")
    assert "more.weight is not in the checkpoint; last.bias is not in the model. The code" in last
    assert "net.py has changed" in last
    for choice in ("name=OTHER", "train.from_scratch=true"):
        assert choice in last
    assert "Traceback" not in done.stderr
    assert run_json(run)["attempts"][-1]["misfit"]
    # With those of before, it goes on, from the newest checkpoint that is intact.
    (file,) = (run / "checkpoints" / "step-00000004").glob("*.distcp")
    os.truncate(file, 9)
    (run / "checkpoints" / "step-00000006.old").mkdir()  # it is put back
    (project / "net.py").write_text(NET)
    edit(project / "helper.py", "mean", "amax")
    done = train(*OWN, "checkpoint.keep=2")
    assert f"the code has changed: {CHANGED}. The run goes on from step 2" in done.stderr
    for choice in ("name=OTHER", "train.from_scratch=true", f"branch {run.name} --step 2"):
        assert choice in done.stderr
    record = run_json(run)
    assert [one.get("code_changed") for one in record["attempts"]][::2] == [None, CHANGED]
    known = [(one["first_step"], one.get("damaged")) for one in record["attempts"]]
    assert known == [(0, None), (4, None), (2, [4, 6])]
    left = sorted(int(path.name[5:]) for path in (run / "checkpoints").iterdir())
    assert left == [2, 6, 8], "the last one of the old code is kept"
    (row,) = json.loads(run_module("hpctrain", "status", "--json", cwd=project).stdout)
    assert row["changed_code"] == f"other code from step 2 on: {CHANGED}"
    edit(project / "helper.py", "amax", "mean")
    assert CHANGED in train(*OWN).stderr
    assert run_json(run) == record


def stage_problem() -> str:
    """Return what two stages of a pipeline say of a checkpoint that has another second stage."""
    weights = {"a": torch.zeros(2, 3)} if distributed.get_rank() == 0 else {"b": torch.zeros(4)}
    properties = TensorProperties(dtype=torch.float32)
    saved = {
        f"model.{name}": TensorStorageMetadata(properties, torch.Size(shape), [])
        for name, shape in {"a": (2, 3), "b": (5,), "c": (1,)}.items()
    }
    return misfit(saved | {"optimizer.x": None}, weights, "model", divided=True)


def test_the_stages_of_a_pipeline_agree_on_what_does_not_fit() -> None:
    assert set(run_ranks(stage_problem, 2)) == {
        "b is 5 there and 4 in the model; c is not in the model"
    }
