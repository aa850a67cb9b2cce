"""Workers on the development cluster: what happens to a trial happens to no other."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import cluster
from tests.conftest import Completed, run_json, run_module, runs
from tests.job.test_worker import by_kind

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.usefixtures("empty_queue")]
TROUBLE = """\
import os, signal
import torch.distributed as dist
from hpctrain.tasks import Classification
from hpctrain.training import Hook

HERE = os.path.dirname(__file__)

class Task(Classification):
    def __init__(self, kind, **options):
        super().__init__(**options)
        self.kind = kind

    def __call__(self, model, batch):
        if self.kind == "wrong":
            raise ZeroDivisionError("a trial that cannot be trained")
        return super().__call__(model, batch)

class Trouble(Hook):
    def after_step(self, state):
        kind = state.task.kind
        last = dist.get_rank() == dist.get_world_size() - 1
        if state.step == 7 and last and not os.path.exists(f"{HERE}/{kind}"):
            open(f"{HERE}/{kind}", "w").close()
            number = {"killed": signal.SIGKILL, "warned": signal.SIGUSR2}.get(kind)
            if number:
                os.kill(os.getpid(), number)
"""


@pytest.mark.usefixtures("slurm_cluster")
@pytest.mark.parametrize("nodes", [1, 2])
def test_trials_go_on_exactly_and_one_that_fails_leaves_the_others(
    nodes: int, train: Callable[..., Completed], digits: Path, tmp_path: Path
) -> None:
    code = tmp_path / "code"
    code.mkdir()
    (code / "trouble.py").write_text(TROUBLE)
    settings = (
        *("train.max_steps=12", "train.eval_every=4", "checkpoint.every_steps=1000"),
        *("task._target_=trouble.Task", "+hooks=[{_target_: trouble.Trouble}]"),
        *("tracking=off", "launch.snapshot=off", "model.dropout=0.1"),
    )
    train(
        *("-m", "hydra/sweeper=optuna", "hydra.sweeper.direction=maximize", *settings),
        *("hydra/sweeper/sampler=random", "hydra.sweeper.sampler.seed=3", "hydra.sweeper.eta=1"),
        *("+task.kind=choice(good,killed,warned,wrong)", "hydra.sweeper.n_trials=4"),
        *("hydra.sweeper.n_jobs=1", "hydra.sweeper.rungs=[5]", f"launch.nodes={nodes}"),
        PYTHONPATH=str(code),
    )
    (sweep,) = (file.parent for file in tmp_path.glob("runs/sweeps/*/search.json"))
    job = (sweep / "workers" / "array-0" / "job_id").read_text().strip() + "_0"
    cluster.wait_for_end([job], 800)
    worker = sweep / "workers" / "0"
    said = "\n".join(log.read_text() for log in worker.glob("logs/*"))
    found = {kind: run_json(run) for kind, run in by_kind(tmp_path).items()}
    states = {kind: [each["state"] for each in one["attempts"]] for kind, one in found.items()}
    assert states == {
        "good": ["paused", "finished"],
        "killed": ["paused", "interrupted", "finished"],
        "warned": ["paused", "interrupted", "finished"],
        "wrong": ["failed"],
    }, said
    assert found["killed"]["attempts"][1]["verdict"] == "restart"
    assert found["warned"]["attempts"][1]["verdict"] == "requeue"
    # One job has trained all of them, in steps of which each could go on.
    attempts = [each for one in found.values() for each in one["attempts"]]
    steps = {(each["restart_count"], each["step_id"]) for each in attempts}
    assert {restart for restart, _ in steps} == {0, 1}
    assert {each["job_id"] for each in attempts} == {job}
    lines = [json.loads(x) for x in (worker / "pieces").read_text().splitlines() if x]
    assert {(x["restart_count"], x["step_id"]) for x in lines} == steps
    assert lines[-1]["code"] == 0
    # They are as if nothing had happened to them, also after two pieces in one step.
    results = [one["result"] for kind, one in found.items() if kind != "wrong"]
    plain = [{k: v for k, v in one.items() if "perf" not in k} for one in results]
    assert plain[0]["step"] == 12
    assert plain[0] == plain[1] == plain[2]
    other = (*settings, f"data.path={digits}", f"output_dir={tmp_path}/alone", "experiment=digits")
    if nodes == 1:
        run_module("hpctrain", *other, "+task.kind=good", cwd=tmp_path, PYTHONPATH=str(code))
        (alone,) = runs(tmp_path / "alone")
        result = run_json(alone)["result"]
        assert {k: v for k, v in result.items() if "perf" not in k} == plain[0]
    assert not (worker / "hang.json").exists()
