"""A training that pauses at a step and goes on is the undisturbed one, bit by bit."""

from pathlib import Path

import pytest

from hpctrain.cluster.ranks.ranks import RankInfo
from hpctrain.config.composing.compose_sweep import Composer
from hpctrain.engine.job.here import train_frozen
from hpctrain.runs.freeze import check, freeze
from tests.conftest import hpctrain_on, journal_metrics, only_run, process_kept, run_json

# An evaluation that the undisturbed run does not make would be seen: by plateau and patience, by
# the random numbers of dropout, and by the means since the last log line. The task has a state.
WATCHED = (
    "task._target_=tests.job.own_tasks.Annealed",
    *("train.max_steps=40", "train.log_every=4", "checkpoint.every_steps=16", "model.dropout=0.1"),
    *(
        "scheduler.kind=plateau",
        "scheduler.plateau.metric=val/loss",
        "scheduler.plateau.patience=1",
    ),
    *("optimizer.lr=0.02", "checkpoint.best=val/loss"),
    *("train.early_stopping.metric=val/accuracy", "train.early_stopping.patience=2"),
    "tracking.upload=false",
)
BY_STEPS, BY_EPOCHS = ("train.eval_every=6",), ("train.global_batch_size=128",)


def until(run: Path, step: int, ranks: int = 1, code: int = 0) -> str:
    """Train a run until a step; return what was printed."""
    done = hpctrain_on(ranks, "run", str(run), "--until-step", str(step), code=code)
    return done.stdout + done.stderr


def weights(run: Path, step: int) -> dict[str, bytes]:
    files = (run / "checkpoints" / f"step-{step:08d}").rglob("*.distcp")
    return {file.name: file.read_bytes() for file in files}


@pytest.mark.parametrize(
    ("every", "ranks"),
    [
        (BY_STEPS, 1),
        pytest.param(BY_EPOCHS, 1, marks=pytest.mark.slow),
        pytest.param(BY_STEPS, 2, marks=pytest.mark.slow),
    ],
)
def test_paused_and_resumed_is_the_undisturbed_run_bit_by_bit(
    digits: Path,
    tmp_path: Path,
    composer: Composer,
    capsys: pytest.CaptureFixture[str],
    every: tuple[str, ...],
    ranks: int,
) -> None:
    where = f"data.path={digits}"
    common = ("experiment=digits", where, *WATCHED, *every)
    config = composer.typed([*common, f"output_dir={tmp_path}/runs"])
    freeze(config, check(config))
    run = only_run(tmp_path)
    done = hpctrain_on(ranks, *common, f"output_dir={tmp_path}/other/runs", cwd=tmp_path)
    undisturbed = only_run(tmp_path / "other")
    expected = journal_metrics(undisturbed)
    end = run_json(undisturbed)["result"]["step"]
    assert ("early stopping" in done.stderr) == (end < 40)

    # No step of an evaluation, a save or a log line; then one of an evaluation.
    for number, step in enumerate((7, 18), 1):
        until(run, step, ranks)
        content = run_json(run)
        assert (content["state"], content["result"]["step"]) == ("paused", step)
        assert content["attempts"][-1]["step"] == step
        assert {"val/loss", "val/accuracy", "train/loss"} <= content["result"].keys()
        assert len(content["attempts"]) == number
        known = expected.get(("val/loss", step), content["result"]["val/loss"])
        assert content["result"]["val/loss"] == known
    if ranks == 1:
        capsys.readouterr()
        with process_kept():
            train_frozen(run, 18, RankInfo.from_env({"HPCTRAIN_LAUNCHER": "single"}))
        assert "is paused at step 18 already" in capsys.readouterr().out
    assert "the run is at step 18 already; give a later step" in until(run, 12, code=2)
    # It ends before this step by itself.
    until(run, 90, ranks)
    assert run_json(run)["state"] == "finished"
    assert run_json(run)["result"]["step"] == end
    assert weights(run, end) == weights(undisturbed, end) != {}
    found = journal_metrics(run)
    assert {key: found[key] for key in expected} == expected
    assert {step for _, step in found.keys() - expected.keys()} <= {7, 18}
    assert run_json(run).get("best") == run_json(undisturbed).get("best")
