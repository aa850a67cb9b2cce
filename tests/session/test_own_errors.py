"""What a loop of one's own does wrong is told at once, each with its sentence."""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from hpctrain.runs.checkpoints.manifest import checkpoints
from tests.conftest import journal_metrics, run_json, runs
from tests.session.runs_of_own import script

# Calls within one session, which goes on after each.
CALLS = {
    "session.model('net', torch.nn.Linear(2, 1))": "the session has that name already",
    "session.keep('net', torch.Generator())": "the session has that name already",
    "session.model('1net', torch.nn.Linear(2, 1))": "a name has letters, digits and _",
    "session.keep('a name', torch.Generator())": "a name has letters, digits and _",
    "session.keep('odd', 7)": "a int has no state_dict()",
    "session.optimizer('other', torch.optim.SGD(values[0].parameters(), 0.1))": (
        "has 2 parameters of no model of the session, the first of shape (3, 2)"
    ),
    "session.log({'train/loss': 1.0})": "session.log: there is no step yet",
    "session.end('early')": "session.end: there is no step yet",
    "session.steps(max_steps=0)": "max_steps=0: give the number of steps",
    "session.data('nothing')": "there is no split 'nothing'",
    "session.model('late', torch.nn.Linear(2, 1))": "the steps have begun",
    "session.optimizer('late', torch.optim.SGD(values[0].parameters(), 0.1))": "have begun",
    "session.keep('late', torch.Generator())": "the steps have begun",
    "session.steps()": "session.steps was entered twice",
    "session.log({'loss': 1.0})": "'loss' is no name of a metric",
    "session.log({'perf/loss': 1.0})": "not one of ours (perf/, best/, lr/, system/, train/epoch",
    "session.log({'train/epoch': 1.0})": "'train/epoch' is no name of a metric",
    "session.log({'train/loss': torch.ones(2)})": "train/loss is (2,); a metric is one number",
    "session.log({'train/loss': 'low'})": "train/loss is str; a metric is one number",
    "session.log({'train/late': 1.0})": "session.log: the steps are over",
    "session.end('late')": "session.end: the steps are over",
}
# Whole loops.
LOOPS = {
    "names": "no error",
    "leaves": "has left session.steps at step 3 of 9, by a break or a return; session.end(reason)",
    "returns_at_once": "the loop has returned without going through session.steps",
    "a_split": "these are the samples of a split, each once; give the training split",
    "empty": "the data has no batch in epoch 0: it is empty",
    "no_number": "a int cannot be iterated",
    "spent": "a list_iterator gives its batches only once",
    "unknown_state": "session.keep: odd.inner.0 is a object",
    "nan": "HealthError: train/norm is not finite since step 7 (first on rank 0",
    "nan,train.nonfinite=rollback": "has left out 10 steps within 1000 steps already",
    "nan_once,train.nonfinite=rollback,train.max_steps=7": "no error",
    "ends": "no error",
    "ends,hooks=[{_target_: hpctrain.training.Hook}]": "a class that inherits from hpctrain.Part",
    "ends,train.max_steps=null": "max_steps=None: give the number of steps",
}
# Refused before a run directory is made, by the key.
CONFIGS = {
    "ends,parallel.tp=2": "parallel.tp=2: the loop would have to compute the loss",
    "ends,parallel.pp=2": "parallel.pp=2: the loop would have to call the stages",
    "ends,parallel.cp=2": "parallel.cp=2: the loop would have to divide each sequence",
    "ends,parallel.ep=2": "parallel.ep=2: the loop would have to balance the experts",
    "ends,parallel.weights=[1]": "parallel.weights=[1",
    "ends,train.nonfinite=skip": "train.nonfinite=skip: a loop of one's own has made its update",
}


def answers(ranks: int, folder: Path, digits: Path, *names: str) -> list[tuple[str, str]]:
    """Return what each of these functions of misuse.py is refused with."""
    done = script(ranks, "misuse", str(folder), str(digits), *names)
    lines = [line for line in done.stdout.splitlines() if line.startswith("[")]
    return [(name, said) for name, said in map(json.loads, lines)]


def check(found: Mapping[str, str], expected: Mapping[str, str]) -> None:
    for name, sentence in expected.items():
        assert sentence in found[name], name


def test_each_mistake_has_its_sentence(digits: Path, tmp_path: Path) -> None:
    refused = dict(answers(1, tmp_path / "none", digits, *CONFIGS))
    check(refused, CONFIGS)
    assert not runs(tmp_path / "none"), "nothing is written"
    found = dict(answers(1, tmp_path, digits, *LOOPS))
    check(found, CALLS | LOOPS)
    made = {run.name.rpartition("-")[0]: run_json(run) for run in runs(tmp_path)}
    assert made["leaves"]["state"] == "failed"
    assert "left session.steps" in made["leaves"]["attempts"][-1]["error"]
    (run,) = (run for run in runs(tmp_path) if run.name.startswith("nan-"))
    assert checkpoints(run / "checkpoints")[0].name == "step-00000006"
    assert max(step for _, step in journal_metrics(run)) == 6, "nothing of it is logged"
    (once,) = (run for run in runs(tmp_path) if run.name.startswith("nan_once"))
    assert journal_metrics(once)["train/sum", 7] == 1 + 2 + 4 + 8 + 16 + 32 + 64


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("log_on_main", "1 of 2 ranks have logged metrics outside of train/ in a step"),
        pytest.param(
            "differ",
            "session.keep('own'): its state is another one on rank 1 than on rank 0",
            marks=pytest.mark.slow,
        ),
        pytest.param("log_other_names", "all ranks log the same names", marks=pytest.mark.slow),
        pytest.param("nan", "since step 7 (first on rank 1", marks=pytest.mark.slow),
    ],
)
def test_ranks_that_differ_are_told(name: str, sentence: str, digits: Path, tmp_path: Path) -> None:
    found = answers(2, tmp_path, digits, "ends", name)
    assert [said for who, said in found if who == "ends"] == ["no error"] * 2
    assert all(sentence in said for who, said in found if who == name)
    ended = next(run for run in runs(tmp_path) if run.name.startswith("ends-"))
    record = run_json(ended)
    assert (record["state"], record["result"]["step"]) == ("finished", 5)
    # The last rank has asked, and rank 0 writes the record.
    assert record["attempts"][-1]["reason"] == "the loop of another rank has ended the run"
