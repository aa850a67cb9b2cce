"""A search whose study and run directories are made by hand, as its workers leave them."""

from pathlib import Path

import optuna
from optuna.distributions import CategoricalDistribution, FloatDistribution, distribution_to_json
from optuna.trial import Trial, TrialState

from hpctrain.search.study_file import study_storage
from hpctrain.search.trials import SearchFile
from tests.made_runs import make_sweep
from tests.report.accounts import attempt, metrics, write_run

RUNGS = (10, 30, 90)
_SPACE = {
    "optimizer.lr": FloatDistribution(1e-4, 1e-1, log=True),
    "model.hidden": CategoricalDistribution(["[64]", "[256]"]),
}
_METRIC = "val/loss"
_STATUS = {"finished": "FINISHED", "paused": "SCHEDULED", "failed": "FAILED"}


def loss(number: int, step: int) -> float:
    """Return the loss of a trial at a step: the best is trial 5, and the order stays."""
    return abs(number - 5) / 10 + 1 / step


def make_search(folder: Path, count: int = 12, *, over: bool = True, told: bool = True) -> Path:
    """Write a search of so many trials and return its folder.

    The last trial has failed, a third of the others has reached the second rung, and the best of
    them the last one. Unless it is `over`, trial 5 waits at the second rung for a worker to go on
    with it, and the others are paused. Unless it is `told`, the study does not have the end yet. An
    attempt takes a second for each step, on two ranks.
    """
    sampler = optuna.samplers.RandomSampler(seed=0)
    storage = folder / "sweeps" / "digits.optuna"
    study = optuna.create_study(
        storage=study_storage(storage), study_name="digits-1", sampler=sampler
    )
    ranked = sorted(range(count - 1), key=lambda number: loss(number, 10))
    runs = []
    for number in range(count):
        trial = study.ask(_SPACE)
        rungs = RUNGS[:1] if number in ranked[count // 3 :] else RUNGS[:2]
        if number == 5 and over:
            rungs = RUNGS
        if number == count - 1:
            rungs = ()
        runs.append(_run(folder, trial, rungs))
        trial.set_user_attr("run", runs[-1].name)
        trial.set_user_attr("goal", 3 if number == 5 else max(1, len(rungs)))
        for step in rungs:
            trial.report(loss(number, step), step)
        if not rungs:
            trial.set_user_attr("reason", "ValueError: no luck")
            study.tell(trial, state=TrialState.FAIL)
        elif number == 5 and over:
            study.tell(trial, loss(number, 90))
        elif over and told:
            trial.set_user_attr("reason", f"not in the best third at step {rungs[-1]}")
            study.tell(trial, state=TrialState.PRUNED)
    if over and told:
        study.set_user_attr("ended", "no trial is left to promote or to begin")
    sweep = make_sweep(folder, "2026-01-31_12-00-00", runs)
    SearchFile(
        study="digits-1",
        storage=str(storage),
        metric=_METRIC,
        direction="minimize",
        n_trials=count,
        rungs=RUNGS,
        etas=(3, 3),
        output_dir=str(folder),
        space={key: distribution_to_json(each) for key, each in _SPACE.items()},
    ).write(sweep)
    return sweep


def _run(folder: Path, trial: Trial, rungs: tuple[int, ...]) -> Path:
    reached, number = max(rungs, default=0), trial.number
    state = "finished" if reached == RUNGS[-1] else "paused" if rungs else "failed"
    begins = (0, *rungs)
    attempts = [
        attempt(first, last, state="paused", world_size=2, step=last)
        for first, last in zip(begins, rungs, strict=False)
    ]
    at = range(5, reached + 1, 5)
    return write_run(
        folder / f"digits-{number:08d}",
        attempts or [attempt(0, 3, state="failed", world_size=2, error="ValueError: no luck")],
        [
            *(metrics(1, step, step, val_loss=loss(number, step)) for step in at),
            {"kind": "status", "attempt": 1, "time": 2e9, "status": _STATUS[state]},
        ],
        state=state,
        config={"metric": _METRIC},
        swept=[f"{key}={value}" for key, value in trial.params.items()],
        result={"step": reached, _METRIC: loss(number, reached)} if rungs else None,
    )
