"""A session in a program of one's own, and what the commands say about a loop of one's own."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

import hpctrain
from hpctrain import cli
from hpctrain.errors import ConfigError
from hpctrain.runs.checkpoints.manifest import checkpoints
from tests.conftest import journal_metrics, only_run, process_kept, run_json, run_module, runs
from tests.session import runs_of_own
from tests.session.runs_of_own import PROGRAMS, script

SHORT = ("train.max_steps=20", "checkpoint.every_steps=5", "train.log_every=4")
AFTER = "after the session"


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_program_goes_on_when_it_is_started_again(
    ranks: int, digits: Path, tmp_path: Path, no_slurm: None
) -> None:
    given = (*runs_of_own.common(digits, tmp_path), *SHORT)
    code = 143 if ranks == 1 else 1
    (tmp_path / "SIGTERM-9-0").touch()
    done = script(ranks, "plain", *given, code=code)
    assert "the session" not in done.stdout, "what follows the loop belongs to its end"
    (run,) = runs(tmp_path)
    assert run_json(run)["state"] == "interrupted"
    # Its loop is the program, which no command can call.
    said = run_module("hpctrain", "resume", run.name, "--dir", str(tmp_path), code=2).stderr
    assert "is a program that opens the session by itself" in said
    again = script(ranks, "plain", *given)
    # The signal comes in a step, or in the one after it.
    assert re.search(r"going on from the checkpoint of step 1[01] ", again.stderr)
    assert again.stdout.count(AFTER) == again.stdout.count("in the session 20") == ranks
    # A finished one is not trained again, unless that is asked for.
    third = script(ranks, "plain", *given)
    assert f"{run.name} is finished already" in third.stdout
    assert AFTER not in third.stdout
    whole = script(ranks, "plain", *given, "launch.rerun=all")
    assert whole.stdout.count(AFTER) == ranks
    first, second = runs(tmp_path)
    runs_of_own.check_same_bits(first, second)
    assert journal_metrics(first) == journal_metrics(second)


def test_a_program_cannot_be_rolled_back(digits: Path, tmp_path: Path) -> None:
    given = runs_of_own.common(digits, tmp_path)
    done = script(1, "plain", *given, "train.nonfinite=rollback", code=1)
    assert "train.nonfinite=rollback: the session is opened by a program" in done.stderr
    assert not runs(tmp_path)


@pytest.mark.slow
def test_the_ranks_of_a_job_open_a_session(
    digits: Path, tmp_path: Path, no_slurm: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(PROGRAMS))
    monkeypatch.setenv("PYTHONPATH", str(PROGRAMS))
    import plain

    given = (*runs_of_own.common(digits, tmp_path / "runs"), *SHORT)
    place = [f"output_dir={tmp_path}/jobs", "launch.snapshot=off"]
    job = hpctrain.submit_function(plain.learn, *given, tasks_per_node=2, overrides=place)
    losses = job.results()
    run = only_run(tmp_path)
    assert losses == [journal_metrics(run)["train/loss", 20]] * 2
    assert run_json(run)["state"] == "finished"


@pytest.fixture(scope="module")
def gan(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of a GAN."""
    folder = tmp_path_factory.mktemp("gan")
    runs_of_own.started(digits, folder)("gan", *SHORT, "checkpoint.keep=2")
    (run,) = runs(folder)
    return run


@pytest.fixture
def says(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """A function that calls a command in this process, and returns what it prints."""

    def call(*words: str) -> str:
        with process_kept():
            assert cli._command(words[0], [*words[1:]]) == 0
        return capsys.readouterr().out

    return call


def test_commands_know_a_loop_of_ones_own(gan: Path, says: Callable[..., str]) -> None:
    status = says("status", str(gan.parent))
    assert "1 finished" in status
    assert "20/20" in status
    assert "d_loss" in says("logs", str(gan))
    live = json.loads(says("status", "--live", str(gan), "--once", "--json"))
    assert (live["state"], live["step"], "train/g_loss" in live["metrics"]) == (
        "finished",
        20,
        True,
    )
    assert "The run is finished after 20 steps" in says("report", str(gan))
    assert "train/g_loss" in says("report", str(gan), "--json")
    assert "step-00000015  (the run is finished; one is newer)" in says("gc", str(gan.parent))
    assert "finished; not resumed" in says("resume", gan.name, "--dir", str(gan.parent))
    found = hpctrain.load_run(gan)
    assert (found.state, found.result["step"]) == ("finished", 20)
    assert found.config.loop["_target_"] == "gan.train"
    assert {"train/d_loss", "train/g_loss", "val/fooled"} < {*found.metrics["key"]}
    assert found.checkpoints == [15, 20]


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("evaluate", ["evaluate", "RUN"]),
        ("predict", ["predict", "RUN", "DATA", "OUT"]),
        ("predict --prompt", ["predict", "RUN", "--prompt", "Hello"]),
        ("export", ["export", "RUN", "OUT"]),
        ("plan", ["plan", "loop=gan", "data.path=DATA", "--config-dir", "CONF"]),
        ("bench", ["bench", "loop=gan", "data.path=DATA", "--config-dir", "CONF"]),
    ],
)
def test_what_needs_our_own_loop_is_refused_by_name(
    what: str, words: list[str], gan: Path, digits: Path, tmp_path: Path
) -> None:
    known = {"RUN": str(gan), "DATA": str(digits), "OUT": str(tmp_path / "out")}
    known["CONF"] = str(PROGRAMS / "conf")
    given = [known.get(word, word.replace("DATA", str(digits))) for word in words]
    with process_kept(), pytest.raises(ConfigError) as refused:
        cli._command(given[0], given[1:])
    assert f"loop._target_=gan.train: {what} knows the model and the task of" in str(refused.value)
    assert not (tmp_path / "out").exists()


def test_a_loaded_run_has_no_model(gan: Path) -> None:
    loaded = hpctrain.load_run(gan)
    with pytest.raises(ConfigError, match=r"load_run\(RUN\).model knows the model and the task"):
        loaded.model()
    with pytest.raises(ConfigError, match=r"load_run\(RUN\).inputs knows the model"):
        loaded.inputs({"image": 0})


def test_a_metric_that_was_never_logged_has_decided_nothing(digits: Path, tmp_path: Path) -> None:
    keys = "train.max_steps=1", "checkpoint.best=val/reward"
    said = runs_of_own.started(digits, tmp_path)("pair", *keys).stderr
    assert "checkpoint.best=val/reward was never logged" in said
    assert "train/rows" in said.partition("was never logged")[2].splitlines()[0]


def test_patience_best_and_the_clock(digits: Path, tmp_path: Path) -> None:
    """What a config says of a run holds for any loop, with the metrics that it logs."""
    stopping = "train.early_stopping={metric: val/val, patience: 2, min_delta: 0.02}"
    runs_of_own.started(digits, tmp_path)(
        *("pair", stopping, "train.max_steps=400", "checkpoint.best=val/val", "checkpoint.keep=2"),
        *("checkpoint.every_s=0.001", "data.val_sets=[{name: first, split: train}]"),
    )
    (run,) = runs(tmp_path)
    record, metrics = run_json(run), journal_metrics(run)
    ended = record["result"]["step"]
    assert record["state"] == "finished"
    assert "early stopping: val/val was best at step" in record["attempts"][-1]["reason"]
    values = {step: value for (name, step), value in metrics.items() if name == "val/val"}
    assert max(values) == ended < 400
    assert record["best"]["value"] == max(values.values())
    kept = [int(path.name.partition("-")[2]) for path in checkpoints(run / "checkpoints")]
    assert {ended, record["best"]["step"]} <= {*kept}
    assert len(kept) <= 3, "the newest two, by the clock, and the best"
