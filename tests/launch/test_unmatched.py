"""Patterns that match nothing in the model are refused before anything is queued."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from hpctrain.config.schema import Config
from hpctrain.job.building.match_patterns import answer
from hpctrain.launch.sweeps import unmatched
from hpctrain.run_record import RunRecord
from tests.conftest import Completed, runs

MODEL = {"_target_": "hpctrain.models.MLP", "in_features": 4, "hidden": [3], "out_features": 2}


def config(model: dict[str, Any] = MODEL, **keys: Any) -> Config:
    made = Config(model=model)
    for key, value in keys.items():
        section, name = {
            "groups": (made.optimizer, "groups"),
            "match": (made.train.lora, "match"),
            "also": (made.train.lora, "also"),
            "rank": (made.train.lora, "rank"),
            "start": (made.checkpoint, "init_from"),
        }[key]
        setattr(section, name, value)
    return made


def entry(made: Config, name: str, **before: Any) -> Any:
    run = SimpleNamespace(name=name, read=lambda: RunRecord(**before))
    return SimpleNamespace(config=made, run=run, overrides=[])


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (config(groups=[{"match": "*.bias", "freeze": True}]), ""),
        (config(match="*", rank=2, also=["1.bias"]), ""),
        (
            config(groups=[{"match": ["1.*", "1.weights"], "weight_decay": 0}]),
            "optimizer.groups[0].match=1.weights: the model has no parameter with such a name; did "
            "you mean 1.weight or",
        ),
        (config(match=["query"]), "train.lora.match=query: no module has such a name; linear laye"),
        (
            config(match="*", rank=2, also=["1.biass"]),
            "train.lora.also=1.biass: the model has no parameter with such a name; did you",
        ),
        # Adapters have names, too.
        (config(match="1", rank=2, groups=[{"match": "*lora_A", "lr_factor": 2.0}]), ""),
    ],
)
def test_a_pattern_is_compared_with_the_names_of_the_model(made: Config, said: str) -> None:
    found = answer(json.loads(unmatched._question(entry(made, "run"))))
    assert found["problem"].startswith(said), found
    assert bool(found["problem"]) == bool(said)
    assert not found["unknown"]


def test_stored_weights_are_compared_with_the_model(tmp_path: Path) -> None:
    given = config(start=str(tmp_path / "model.safetensors"))
    kept = {"1.weight": torch.zeros(3, 4), "1.bias": torch.zeros(3), "3.bias": torch.zeros(2)}
    for stored, said in [
        ({}, ""),
        ({"1.weight": torch.zeros(3, 4, dtype=torch.int8)}, "1.weight is stored as int8 and is f"),
        ({"1.weight": torch.zeros(4, 4)}, "1.weight is 4 x 4 there and 3 x 4 in the model"),
        ({"5.weight": torch.zeros(1)}, "nothing of these names, which are stored: 5.weight"),
    ]:
        save_file(kept | stored, tmp_path / "model.safetensors")
        found = answer(json.loads(unmatched._question(entry(given, "run"))))
        assert said in found["problem"]
        assert found["problem"].startswith("checkpoint.init_from=" if said else "")
        assert bool(found["problem"]) == bool(said)
        assert not found["unknown"]


def test_each_distinct_model_is_built_once_and_only_for_new_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The process is left out here: its function is called in this one."""
    asked: list[list[str]] = []

    def answers(questions: list[str]) -> list[dict[str, str]]:
        asked.append(questions)
        return [answer(json.loads(question)) for question in questions]

    monkeypatch.setattr(unmatched, "_answers", answers)
    wrong = [{"match": "7.*", "freeze": True}]
    plain = entry(config(), "plain")
    assert unmatched.unmatched([plain]) == []
    assert asked == [], "without patterns torch is not imported"
    one, two = (entry(config(groups=wrong), name) for name in ("one", "two"))
    two.config.optimizer.lr = 0.5
    other = entry(config(MODEL | {"hidden": [5]}, groups=wrong), "other")
    known = entry(config(MODEL | {"hidden": [6]}, groups=wrong), "known", state="finished")
    broken = entry(config(MODEL | {"hidden": "a"}, groups=wrong), "broken")
    found = unmatched.unmatched([plain, one, two, other, known, broken])
    assert len(asked[0]) == 3
    assert [each.run.name for each, _ in found] == ["one", "two", "other"]
    assert all("optimizer.groups[0].match=7.*: the model has no" in str(e) for _, e in found)
    said = capsys.readouterr().err
    assert said.count("broken: it is not known here whether they fit: model._targ") == 1


@pytest.mark.slow
def test_nothing_is_queued(
    train: Callable[..., Completed], tmp_path: Path, no_sbatch: dict[str, str]
) -> None:
    """The model is a class of the user, beside the command, whose constructor prints something."""
    (tmp_path / "talking.py").write_text(
        "import torch\n\nclass Net(torch.nn.Linear):\n    def __init__(self):\n"
        "        super().__init__(64, 10)\n        print('hello')\n"
    )
    patterns = "optimizer.groups=[{match: biass, weight_decay: 0}]"
    own = ("~model", "+model={_target_: talking.Net}")
    done = train("-m", "optimizer.lr=0.1,0.2", *own, patterns, code=2, **no_sbatch)
    assert "2 of 2 runs are wrong; nothing was queued" in done.stderr
    assert "match=biass: the model has no parameter with such a name; did you mean bias?" in (
        done.stderr
    )
    assert not runs(tmp_path / "runs")
