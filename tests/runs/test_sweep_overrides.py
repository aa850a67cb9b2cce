"""What distinguishes the runs of a sweep, in texts for people."""

import pytest

from hpctrain.base.secrets import MASK
from hpctrain.runs.sweep_overrides import distinguishing, values_of

GRID = [(lr, seed) for lr in (0.1, 0.2) for seed in (0, 1)]
RUNS = [["experiment=digits", f"optimizer.lr={lr}", f"seed={seed}"] for lr, seed in GRID]


def test_values_that_all_runs_share_are_left_out() -> None:
    assert values_of(RUNS)[3] == ["optimizer.lr=0.2", "seed=1"]
    assert values_of(RUNS[:2]) == [["seed=0"], ["seed=1"]]
    assert values_of([]) == []


def test_secrets_are_masked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_TOKEN", "s3cr3t-value-12345")
    shown = values_of([["a=s3cr3t-value-12345"], ["a=b"]])
    assert shown == [[f"a={MASK}"], ["a=b"]]


def test_runs_of_no_sweep_differ_in_what_decides_their_results() -> None:
    adam = {
        "optimizer": {"lr": 1e-3, "kind": "adamw", "betas": [0.9, 0.95]},
        "seed": 0,
        "name": "a",
    }
    again = adam | {"seed": 1, "name": "b", "launch": {"nodes": 2}, "tracking": {"uri": "x"}}
    other = adam | {"optimizer": {"lr": 0.1, "kind": "sgd", "momentum": 0.9}}
    texts = ["experiment=digits", "optimizer.lr=1e-3"]
    # The place and the name of a run do not matter, nor how a number is written.
    found = distinguishing([(adam, texts), (again, ["experiment=digits", "optimizer.lr=0.001"])])
    assert found == [{"seed": "0"}, {"seed": "1"}]
    # A choice stands for its keys; a key that was given as well stays.
    found = distinguishing([(adam, texts), (other, ["experiment=digits", "optimizer=sgd"])])
    assert found == [
        {"optimizer": "", "optimizer.lr": "0.001"},
        {"optimizer": "sgd", "optimizer.lr": "0.1"},
    ]
    # A config that cannot be read makes no difference, nor does one that is older than a key.
    assert distinguishing([(adam, texts), ({}, texts), (adam | {"new": 1}, texts)]) == [{}] * 3
