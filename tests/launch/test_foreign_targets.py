"""Objects that are not hpctrain's or torch's are imported once before anything is queued."""

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hpctrain.base.names.run_record import RunRecord
from hpctrain.config.rules.objects import called
from hpctrain.config.schema import Config
from hpctrain.insight import foreign_targets
from tests.conftest import Completed, runs

MINE = """\
print("hello")

class Net:
    def __init__(self, width: int, *, depth=1): pass

def halved(step, max_steps, times=2): pass

def augment(sample, random, size): pass
"""


@pytest.fixture(autouse=True)
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in (
        ("mine", MINE),
        ("broken", "raise OSError('no GPU')"),
        ("lacking", "import x_y_z"),
    ):
        (tmp_path / f"foreign_{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)


def config(model: str, **arguments: Any) -> Config:
    made = Config(model={"_target_": model, **arguments})
    made.task = {"_target_": "hpctrain.tasks.Classification"}
    return made


def answer(made: Config) -> dict[str, str]:
    return foreign_targets.answer([asdict(one) for one in called(made) if not one.is_own])


@pytest.mark.parametrize(
    ("target", "given", "problem", "unknown"),
    [
        ("foreign_mine.Net", {"width": 3}, "", ""),
        (
            "foreign_mine.Net",
            {"width": 3, "nap": 1},
            "model.nap=1: foreign_mine.Net has no arg",
            "",
        ),
        ("foreign_mine.Net", {}, "model.width is missing: foreign_mine.Net needs it", ""),
        (
            "foreign_mine.Nett",
            {},
            "model._target_=foreign_mine.Nett: foreign_mine has no 'Nett'",
            "",
        ),
        ("foreign_mine.inner.Net", {}, "foreign_mine has no 'inner'", ""),
        ("foreign_broken.Net", {}, "", "foreign_broken.Net: OSError: no GPU"),
        ("foreign_lacking.Net", {}, "", "ModuleNotFoundError"),
        ("math.sqrt", {"x": 1}, "", ""),
    ],
)
def test_the_answer(target: str, given: dict[str, Any], problem: str, unknown: str) -> None:
    found = answer(config(target, **given))
    assert problem in found["problem"]
    assert bool(problem) == bool(found["problem"])
    assert unknown in found["unknown"]
    assert bool(unknown) == bool(found["unknown"])


def test_schedules_and_transforms_get_what_hpctrain_gives() -> None:
    made = config("foreign_mine.Net", width=1)
    made.scheduler._target_, made.scheduler.options = "foreign_mine.halved", {"times": 3}
    made.data.transforms = [{"_target_": "foreign_mine.augment", "_partial_": True, "size": 3}]
    assert answer(made) == {"problem": "", "unknown": ""}
    made.scheduler.options["tims"] = 3
    made.data.transforms[0]["sizes"] = 3
    told = answer(made)["problem"].splitlines()
    assert told[0].startswith("scheduler.options.tims=3: foreign_mine.halved has no argument tims")
    assert told[1].startswith("data.transforms[0].sizes=3: foreign_mine.augment has no argument")


def test_each_distinct_set_is_imported_once_and_only_for_new_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[list[str]] = []

    def answers(questions: list[str]) -> list[dict[str, str]]:
        asked.append(questions)
        return [foreign_targets.answer(json.loads(question)) for question in questions]

    def entry(made: Config, name: str, **before: Any) -> Any:
        run = SimpleNamespace(name=name, read=lambda: RunRecord(**before))
        return SimpleNamespace(config=made, run=run, overrides=[])

    monkeypatch.setattr(foreign_targets, "_answers", answers)
    own = entry(config("hpctrain.models.MLP"), "own")
    assert foreign_targets.refused([own]) == []
    assert asked == []
    one, two = (entry(config("foreign_mine.Net", nap=1, width=1), name) for name in ("one", "two"))
    two.config.seed = 5
    known = entry(config("foreign_mine.Net", nap=2), "known", state="finished")
    inside = entry(config("foreign_mine.Net", nap=3), "inside")
    inside.config.site.container.runtime = "apptainer"
    broken = entry(config("foreign_broken.Net"), "broken")
    found = foreign_targets.refused([own, one, two, known, inside, broken])
    assert len(asked[0]) == 2
    assert [each.run.name for each, _ in found] == ["one", "two"]
    assert capsys.readouterr().err.count("broken: it is not known here whether") == 1


def test_nothing_is_queued(train: Callable[..., Completed], tmp_path: Path) -> None:
    own = ("~model", "+model={_target_: foreign_mine.Net, nap: 1}")
    done = train("-m", "optimizer.lr=0.1,0.2", *own, code=2)
    assert "2 of 2 runs are wrong; nothing was queued" in done.stderr
    assert "model.nap=1: foreign_mine.Net has no argument nap; it has width, depth" in done.stderr
    assert not runs(tmp_path / "runs")
