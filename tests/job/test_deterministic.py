"""train.deterministic: on inside of a training, and as before after it."""

from pathlib import Path

import pytest
import torch

from hpctrain.engine.supervised.deterministic import deterministic
from hpctrain.errors import ConfigError
from tests.conftest import run_module

CALLS = """\
import sys
import torch
import hpctrain
from hpctrain.tasks import Classification

sys.modules["calls"] = sys.modules["__main__"]
cudnn = torch.backends.cudnn

def settings():
    return torch.are_deterministic_algorithms_enabled(), cudnn.deterministic, cudnn.benchmark

class Told(Classification):
    seen = set()

    def __call__(self, model, batch):
        self.seen.add(settings())
        return super().__call__(model, batch)

class Refused(Told):
    def __call__(self, model, batch):
        torch.zeros(2).put_(torch.tensor([0]), torch.ones(1))
        return super().__call__(model, batch)

cudnn.benchmark = True
common = {given!r}
for name, keys in {{
    "on": ["name=on", "train.deterministic=true"],
    "refused": ["name=refused", "train.deterministic=true", "task._target_=calls.Refused"],
}}.items():
    Told.seen.clear()
    try:
        result = hpctrain.train(*common, *keys)
    except hpctrain.errors.ConfigError as error:
        result = error
    print(name, "|", Told.seen or {{}}, "|", settings(), "|", result)
"""


def test_on_inside_of_a_training_and_off_after_it(digits: Path, tmp_path: Path) -> None:
    given = ["experiment=digits", f"data.path={digits}", "output_dir=runs", "tracking=off"]
    given += ["task._target_=calls.Told", "train.max_steps=3", "model.dropout=0.1"]
    (tmp_path / "calls.py").write_text(CALLS.format(given=given))
    done = run_module("calls", cwd=tmp_path)
    lines = [line.split(" | ") for line in done.stdout.splitlines() if " | " in line]
    (_, on, *after), (_, refused, *after_error) = lines
    assert on == "{(True, True, False)}"
    assert after[0] == after_error[0] == "(False, False, True)"
    assert 0 < float(after[1]) < 1
    assert refused == "{}"
    assert after_error[1].startswith(
        "train.deterministic=true: put_ does not have a deterministic implementation"
    )


@pytest.mark.parametrize("exported", [None, ":0:0"])
def test_a_workspace_that_torch_refuses(
    monkeypatch: pytest.MonkeyPatch, exported: str | None
) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    if exported is not None:
        monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", exported)
    with (
        pytest.raises(ConfigError, match=r"CUBLAS_WORKSPACE_CONFIG='(unset|:0:0)' is not one of"),
        deterministic(torch.device("cuda")),
    ):
        raise AssertionError("the training must not start")
    assert not torch.are_deterministic_algorithms_enabled()
