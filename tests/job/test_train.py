"""Training as users start it: on one rank, on two ranks, stopped and resumed."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hpctrain.config.composing.compose_sweep import Composer
from hpctrain.errors import DataError
from hpctrain.runs.freeze import check
from tests import forkserver
from tests.conftest import NET, Completed, only_run, run_json

Train = Callable[..., Completed]
# Tests that stop it let its steps sleep until then.
LONG = (
    *("train.max_epochs=10", "checkpoint.every_steps=25", "train.log_every=5"),
    "model.dropout=0.1",
)


# A task that counts the models which are still there when the process group ends.
COUNTING = """\
import weakref
import torch.distributed as dist
from hpctrain.tasks import Classification

end, seen = dist.destroy_process_group, []

def count_and_end():
    print("models:", len(seen), "alive:", sum(model() is not None for model in seen))
    end()

dist.destroy_process_group = count_and_end

class Counting(Classification):
    def __call__(self, model, batch):
        if not seen:
            seen.append(weakref.ref(model))
        return super().__call__(model, batch)
"""


def wait_for_step(run_folder: Path, step: int, process: subprocess.Popen[Any]) -> None:
    """Wait until there is a checkpoint of at least `step`, for at most 120 s."""
    end = time.monotonic() + 120
    while not any(
        int(path.name[5:]) >= step for path in run_folder.glob("*/checkpoints/step-????????")
    ):
        assert process.poll() is None, f"ended with {process.returncode} before step {step}"
        assert time.monotonic() < end, f"no checkpoint of step {step} in 120 s"
        time.sleep(0.05)


def test_digits_reach_97_percent_and_are_tracked(train: Train, store: Path, tmp_path: Path) -> None:
    done = train()
    run = only_run(tmp_path)
    result = run_json(run)["result"]
    assert run_json(run)["state"] == "finished"
    assert result["val/accuracy"] >= 0.97
    assert "samples/s" in done.stdout
    assert "mlflow" in done.stdout
    # The summary of the model is in the log, and in a file that MLflow gets.
    summary = (run / "artifacts" / "model.txt").read_text()
    assert summary.startswith("model MLP: 85,002 parameters, 0.32 MiB in float32\n")
    assert summary in done.stderr
    assert "artifacts/model.txt" in (run / "journal" / "events.jsonl").read_text()
    # The same command does not train again.
    before = (run / "run.json").read_bytes()
    assert "is finished already" in train().stdout
    assert (run / "run.json").read_bytes() == before


def torchrun(digits: Path, tmp_path: Path) -> subprocess.Popen[bytes]:
    """Start two ranks of a long training, and wait until it has made its first checkpoint."""
    where = [f"data.path={digits}", f"output_dir={tmp_path}/runs", "tracking=off"]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    training = ["experiment=digits", "train.max_epochs=5000", *LONG[1:]]
    process = forkserver.Popen(
        [*command, "-m", "hpctrain", *training, *where], stderr=subprocess.DEVNULL
    )
    wait_for_step(tmp_path / "runs", 25, process)
    return process


def opened(pid: str) -> list[str]:
    """Return the files that a process has open; it opens and closes others meanwhile."""
    files = []
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            files.append(os.readlink(link))
    return files


def test_all_ranks_know_why_one_of_them_was_stopped(digits: Path, tmp_path: Path) -> None:
    process = torchrun(digits, tmp_path)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    # A fork does not show its environment; rank 1 is the process that writes the log of rank 1.
    (second,) = (
        pid for pid in children if any(file.endswith(".rank1.log") for file in opened(pid))
    )
    os.kill(int(second), signal.SIGINT)
    assert process.wait(120) == 1  # torchrun ends with 1, whatever the exit codes of its ranks
    record = run_json(only_run(tmp_path))
    assert (record["state"], record["attempts"][-1]["reason"]) == ("interrupted", "SIGINT")


def test_a_failing_training_exits_1_with_its_traceback(train: Train, tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text(NET.replace("return super()", 'raise OSError("no luck") #'))
    given = ("model._target_=bad.Net", "tracking=off")
    env = {"PYTHONPATH": str(tmp_path), "PYTHONPROFILEIMPORTTIME": "1"}
    done = train(*given, code=1, new=True, **env)
    assert "Traceback" in done.stderr
    assert "OSError: no luck" in done.stderr
    # Importing torch takes seconds: there is one line before that.
    before_torch, _, after = done.stderr.partition("| torch\n")
    assert (before_torch.count(": starting"), after.count(": starting")) == (1, 0)
    assert run_json(only_run(tmp_path))["state"] == "failed"


@pytest.mark.parametrize("parallel", ["ddp", pytest.param("zero3", marks=pytest.mark.slow)])
def test_the_model_ends_before_the_process_group(
    train: Train, tmp_path: Path, parallel: str
) -> None:
    """A DDP model that ends after its group holds Python's lock, for which gloo's thread waits."""
    (tmp_path / "counting.py").write_text(COUNTING)
    ours = ("task._target_=counting.Counting", "train.max_steps=2", "tracking=off")
    done = train(*ours, f"parallel={parallel}", PYTHONPATH=str(tmp_path))
    assert "models: 1 alive: 0" in done.stdout


TASK = """\
from hpctrain.tasks import Classification

class Task(Classification):
    def derived(self, means):
        return {"rmse": means["loss"] ** 0.5}
"""


def test_a_metric_that_a_users_task_lacks_ends_the_run_at_its_first_log_line(
    train: Train, tmp_path: Path
) -> None:
    (tmp_path / "my_task.py").write_text(TASK)
    short = ("tracking=off", "train.log_every=3", "train.max_steps=9")
    task = ("task._target_=my_task.Task", "metric=val/rmsee")
    done = train(*task, *short, code=2, PYTHONPATH=str(tmp_path))
    said = "error: metric=val/rmsee: did you mean val/rmse? this run produces perf/samples_per_s, "
    assert said in done.stderr
    assert "step 3/9" in done.stderr
    assert "step 6/9" not in done.stderr
    run = only_run(tmp_path)
    assert run_json(run)["attempts"][-1]["error"].startswith("ConfigError: metric=val/rmsee")


def test_no_traceback_unless_asked(train: Train) -> None:
    done = train("optimizer.lr=-1", code=2, new=True)
    assert done.stderr == "error: optimizer.lr=-1.0: it must be greater than 0\n"
    assert "Traceback" in train("optimizer.lr=-1", code=2, HPCTRAIN_DEBUG="1").stderr


def test_data_errors(train: Train, composer: Composer, digits: Path, tmp_path: Path) -> None:
    assert "/nowhere" in train("data.path=/nowhere", code=3).stderr

    def error(path: Path) -> str:
        """Return what the command would print before it ends with code 3."""
        given = ("experiment=digits", f"data.path={path}", f"output_dir={tmp_path}/runs")
        with pytest.raises(DataError) as caught:
            check(composer.typed([*given]))
        assert caught.value.exit_code == 3
        return str(caught.value)

    copy = tmp_path / "copy"
    copy.mkdir()
    for file in digits.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    shard = next(copy.glob("*train*.h5"))
    os.truncate(shard, shard.stat().st_size - 1000)
    assert shard.name in error(copy)
    assert not (tmp_path / "runs").exists()


def test_no_write_permission(train: Train) -> None:
    # Root may write everywhere except in the kernel's own file systems.
    done = train("output_dir=/sys/none", "tracking=off", code=6)
    assert "output_dir=/sys/none: cannot write /sys/none" in done.stderr


def test_a_constructor_that_raises_is_shown_with_its_file(train: Train, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "def build(**sizes):\n    return check(sizes)\n\n\n"
        "def check(sizes):\n    raise ValueError('odd sizes')\n"
    )
    done = train("model._target_=mine.build", "tracking=off", code=2)
    assert "error: model._target_=mine.build: ValueError: odd sizes\n" in done.stderr
    # The frames of the user, and no others.
    frames = [line for line in done.stderr.splitlines() if line.lstrip().startswith("File ")]
    assert [line.rpartition(" in ")[2] for line in frames] == ["build", "check"]
    assert all(f'"{tmp_path}/mine.py"' in line for line in frames)
    run = only_run(tmp_path)
    assert "mine.py" in run_json(run)["attempts"][-1]["error"]


def test_ranks_that_nobody_started_are_refused(train: Train) -> None:
    done = train("launch.nodes=2", code=2)
    assert "launch.nodes=2 x launch.tasks_per_node=1 = 2 ranks, but 1 was started" in done.stderr
    job = {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "4"}
    assert "this job has 4 tasks" in train(code=2, **job).stderr


def test_rank_0_requeues_its_job(train: Train, tmp_path: Path) -> None:
    """The grace time may end before the batch script can; the scheduler is a stand-in."""
    (tmp_path / "mine.py").write_text(
        "import os, signal\nfrom hpctrain.training import Hook\n\n\n"
        "class Preempted(Hook):\n    def after_step(self, state):\n"
        "        if state.step == 3:\n            os.kill(os.getpid(), signal.SIGUSR2)\n"
    )
    for name, says in (("squeue", "echo RUNNING"), ("scontrol", f'echo "$*" >> {tmp_path}/asked')):
        (tmp_path / name).write_text(f"#!/bin/sh\n{says}\n")
        (tmp_path / name).chmod(0o755)
    numbers = {"JOB_ID": 7, "PROCID": 0, "LOCALID": 0, "NODEID": 0, "STEP_ID": 0}
    step = {"STEP_NUM_TASKS": 1, "STEP_TASKS_PER_NODE": 1, "STEP_NODELIST": socket.gethostname()}
    job = {f"SLURM_{name}": str(value) for name, value in (numbers | step).items()}
    job["PATH"] = f"{tmp_path}:{os.environ['PATH']}"
    train("hooks=[{_target_: mine.Preempted}]", "tracking=off", code=143, **job)
    assert "requeue 7" in (tmp_path / "asked").read_text().splitlines()
