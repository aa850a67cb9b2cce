"""Several runs in one job (launch.pack)."""

import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hpctrain.base.names.run_record import AttemptKey, RunRecord, Submission
from hpctrain.cluster.slurm import node_kinds, steps
from hpctrain.cluster.slurm.partition_limit import Road
from hpctrain.cluster.slurm.queue import Job, Queue
from hpctrain.config.composing.compose_sweep import Composer
from hpctrain.config.schema import Config, DataConfig, LaunchConfig
from hpctrain.config.validate import validate
from hpctrain.errors import ConfigError
from hpctrain.launch import arrays
from hpctrain.launch.entry import Entry
from hpctrain.runs.run_dir import RunDir
from hpctrain.runs.state import stop_request
from hpctrain.runs.state.shared_job import has_left, has_others, is_elsewhere, job_of, runs_of
from hpctrain.runs.state.verdict import after_srun
from tests import cluster
from tests.conftest import Completed, run_json, run_module, runs
from tests.made_runs import make_run

Train = Callable[..., Completed]
PACKED = """\
import os, signal
from hpctrain.tasks import Classification

class Packed(Classification):
    calls = 0

    def __init__(self, *, fault="none", **options):
        super().__init__(**options)
        self.fault, self.folder = fault, os.path.dirname(__file__)

    def __call__(self, model, batch):
        self.calls += 1
        if self.calls == 25 and self.fault == "error":
            raise ValueError("as asked")
        once = f"{self.folder}/killed"
        if self.calls == 25 and self.fault == "kill" and not os.path.exists(once):
            open(once, "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__call__(model, batch)
"""


# Of three runs one has saved and asks for the requeue, one trains on, one ended before.
SHELLS = """\
job=7_1 nodes=1 script=/sweep/array-0/job.sh SLURM_JOB_NUM_NODES=1
ranks() {
    case $run in
    */asks)
        echo node2 >"$run/requeue"
        while [[ -e $run/requeue ]]; do sleep 0.1; done
        exit 0
        ;;
    */trains)
        while [[ ! -e $folder/asks/requeue-job ]]; do sleep 0.1; done
        echo trained >>"$folder/said"
        exit 3
        ;;
    esac
    echo "$run has begun" >>"$folder/said"
}
verdict() { [[ $* != */ended\\ $script ]] || echo "left 1"; }
squeue() { echo RUNNING; }
scontrol() { [[ $1 == show ]] || echo "$*" >>"$folder/said"; }
"""


def test_the_job_is_requeued_once_when_no_run_trains_any_more(tmp_path: Path) -> None:
    """The ranks, the verdict and Slurm's commands are stand-ins."""
    given = [tmp_path / name for name in ("asks", "trains", "ended")]
    for run in given:
        (run / "logs").mkdir(parents=True)
    text = f"folder={tmp_path}\n{SHELLS}\n{steps.TEXT}\n{steps.PACK}\n"
    text += f'run_pack {" ".join(map(str, given))}\nexit "$code"'
    done = subprocess.run(["bash", "-c", text], capture_output=True, text=True, timeout=120)
    assert done.returncode == 3, done.stderr
    assert (tmp_path / "said").read_text().splitlines() == [
        "trained",
        *("update JobId=7_1 Requeue=1", "requeue 7_1", "update JobId=7_1 ExcNodeList=node2"),
    ]
    assert "does not begin here" in (given[2] / "logs" / "7_1.batch.log").read_text()


def test_a_job_that_slurm_will_cancel_does_not_wait_for_the_slowest_run(tmp_path: Path) -> None:
    """The ranks, the verdict and Slurm's commands are stand-ins; one run never stops."""
    given = [tmp_path / name for name in ("asks", "hangs")]
    for run in given:
        (run / "logs").mkdir(parents=True)
    late = """
        ranks() {
            [[ $run != */hangs ]] || while [[ ! -e $folder/said ]]; do sleep 0.1; done
            echo >"$run/requeue"
            while [[ -e $run/requeue ]]; do sleep 0.1; done
        }
        scontrol() {
            [[ $1 == --oneliner ]] || { [[ $1 == show ]] || echo "$*" >>"$folder/said"; return; }
            echo " StartTime=2026-01-01T00:00:00 EndTime=x PreemptTime=2026-01-01T01:00:00 "
        }
        export HPCTRAIN_GRACE_S=30
    """
    text = f"folder={tmp_path}\n{SHELLS}\n{late}\n{steps.TEXT}\n{steps.PACK}\n"
    text += f"run_pack {' '.join(map(str, given))}"
    done = subprocess.run(["bash", "-c", text], capture_output=True, text=True, timeout=120)
    assert (tmp_path / "said").read_text().splitlines()[-1] == "requeue 7_1", done.stderr


def asked(folder: Path, count: int, **launch: Any) -> list[Entry]:
    config = Config(
        name="digits",
        output_dir=str(folder),
        data=DataConfig(path="/data"),
        launch=LaunchConfig(pack=2, gpus_per_node=1, mem_gb=3, **launch),
    )
    return [Entry([], config, RunDir(folder / f"digits-{n}")) for n in range(count)]


def test_an_array_task_is_a_job_of_several_runs(tmp_path: Path, no_slurm: None) -> None:
    entries = asked(tmp_path, 5, max_running=3)
    full, rest = arrays.plan(entries, tmp_path / "sweep", 1000)
    assert [len(each.entries) for each in (full, rest)] == [4, 1]
    assert (full.tasks, full.max_running, rest.tasks, rest.max_running) == (2, 1, 1, 1)
    text, alone = full.text(), rest.text()
    for line in ("--array=0-1%1", "--ntasks-per-node=2", "--gpus-per-node=2", "--mem=6144M"):
        assert f"#SBATCH {line}\n" in text
    for line in ("--array=0-0%1", "--ntasks-per-node=1", "--gpus-per-node=1", "--mem=3072M"):
        assert f"#SBATCH {line}\n" in alone
    assert 'exec srun "$@" --exact' in text
    assert "--exact" not in alone
    (step,) = (line for line in text.splitlines() if "--kill-on-bad-exit" in line)
    assert "--gpus-per-node=1" in step
    full.write(None)
    assert [entry.task for entry in full.entries] == [
        (str(full.folder / "job.sh"), n) for n in (0, 0, 1, 1)
    ]
    half = full.halve(tmp_path / "sweep" / "array-2")
    assert [len(each.entries) for each in (full, half)] == [2, 2]


def test_a_run_leaves_its_job_and_the_others_stay(tmp_path: Path) -> None:
    """Those that have ended for good, were cancelled, or have another job now."""
    sweep = tmp_path / "array-0"
    sweep.mkdir()
    script = str(sweep / "job.sh")
    submission = {"script": script, "task": 1, "user": "root", "time": 1.0, "pack": 5}
    attempt = {"job_id": "7_1", "started": 2.0}
    names = ("trains", "failed", "restarts", "waits", "other")
    trains, failed, restarts, waits, other = (
        make_run(tmp_path, f"digits-{name}", submission=submission, **record)
        for name, record in zip(
            names,
            (
                {"state": "running", "attempts": [attempt]},
                {"state": "failed", "attempts": [attempt | {"verdict": "failed"}]},
                {"state": "failed", "attempts": [attempt]},
                {"state": "queued", "attempts": [attempt | {"verdict": "failed"}]},
                {"state": "queued"},
            ),
            strict=True,
        )
    )
    given = [trains, failed, restarts, waits, other]
    (sweep / "tasks").write_text("/of/task/0\n" * 5 + "".join(f"{run}\n" for run in given))
    assert runs_of(RunRecord.of(trains).submission or Submission()) == [*map(str, given)]
    job = Job("7_1", "RUNNING", "None", "node1", "N/A")
    queue = Queue({(script, 1): job})
    assert [job_of(run, RunRecord.of(run), queue) for run in given] == [job, None, job, job, job]
    stop_request.write(waits, "ann")
    stop_request.write(trains, "ann")  # it saves first
    assert [is_elsewhere(run, script) for run in given] == [False, True, False, True, False]
    # One that was cancelled may be trained in a terminal: then it has left the job, too.
    here = {"job_id": "", "started": 3.0, "launcher": "single"}
    RunDir(waits).update(state="running", attempts=[attempt, here])
    stop_request.StopRequest.drop(waits)
    assert job_of(waits, RunRecord.of(waits), queue) is None
    assert is_elsewhere(waits, script)
    assert is_elsewhere(other, str(tmp_path / "array-1" / "job.sh"))
    assert has_others(RunRecord.of(trains), {str(trains)})
    assert not has_others(RunRecord.of(trains), {*map(str, (trains, restarts, other))})


def test_a_run_whose_ranks_say_nothing_is_recorded_as_failed(tmp_path: Path) -> None:
    """Slurm tells of a job of one run that it has failed, but not of one that others share."""
    for pack, state in ((1, "queued"), (2, "failed")):
        submission = {"script": "/job.sh", "user": "root", "time": 1.0, "pack": pack}
        run = RunDir(make_run(tmp_path, f"pack{pack}", state="queued", submission=submission))
        assert after_srun(run, 1, AttemptKey("7_1", 0, 3), inside=True) == ""
        assert run.read().state == state
    assert run.read().attempt.error == "the ranks ended with exit code 1, and have not said why"
    assert has_left(run.path, run.read())


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ("launch.nodes=1-2", "with launch.nodes=1-2"),
        ("launch.spares=1", "with launch.spares=1"),
        ("launch.chain=2", "with launch.chain=2"),
        ("launch.gpus_per_node=1 site.gpu_option=none", "with site.gpu_option=none"),
        ("site.srun=[--overlap]", "with site.srun=['--overlap']"),
        ("+site.env.MASTER_PORT=29500", "with site.env.MASTER_PORT"),
    ],
)
def test_what_does_not_go_with_a_pack(keys: str, said: str, composer: Composer) -> None:
    composed = composer.typed(["experiment=digits", "launch.pack=2", *keys.split()])
    with pytest.raises(ConfigError, match=f"launch.pack=2 {re.escape(said)}"):
        validate(composed)


@pytest.mark.parametrize(
    ("devices", "job", "step"),
    [
        ("gpu:2,shard:8", "shard:2", "shard:1"),
        ("gpu:a100:4(S:0-1),shard:a100:40(S:0-1)", "shard:6", "shard:3"),
        ("gpu:1,shard:4,mps:100", "mps:50", "mps:25"),
        ("gpu:4,shard:4", "the GPUs of the partition that is the default one have 1 parts", ""),
        ("gpu:4", "no node of the partition that is the default one has parts of GPUs", ""),
    ],
)
def test_runs_share_one_gpu_by_the_parts_that_slurm_has(
    devices: str, job: str, step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in for sinfo; the real one answers in the test of shards."""
    node_kinds._offered.cache_clear()
    kinds = f"batch*|up|infinite|NO|1|1|8|1|{devices}||n1\ncpu|up|infinite|NO|1|1|8|1|(null)||n2"
    monkeypatch.setattr(node_kinds, "ask", lambda *_, **__: kinds)
    monkeypatch.setattr(arrays, "_road", lambda _: Road("requeue"))
    (array,) = arrays.plan(asked(tmp_path, 2, gpus_per_run=0.25), tmp_path / "sweep", 1000)
    if not step:
        with pytest.raises(ConfigError, match=job):
            array.text()
        return
    text = array.text()
    assert f"#SBATCH --gres={job}\n" in text
    assert f" --gres={step} " in text
    assert "gpus-per-node" not in text


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ("launch.pack=5", "with launch.pack=5: all runs of a job share one GPU"),
        ("launch.gpus_per_node=2 launch.tasks_per_node=2", "with launch.tasks_per_node=2: only"),
        ("site.gpu_type=a100", "with site.gpu_type=a100: parts of GPUs have none"),
        ("launch.preflight=full", "with launch.preflight=full"),
    ],
)
def test_what_does_not_go_with_a_shared_gpu(keys: str, said: str, composer: Composer) -> None:
    share = ("launch.gpus_per_run=0.25", "launch.gpus_per_node=1")
    with pytest.raises(ConfigError, match=f"launch.gpus_per_run=0.25 {re.escape(said)}"):
        validate(composer.typed(["experiment=digits", *share, *keys.split()]))


def by_fault(folder: Path) -> dict[str, Path]:
    """Return the run directories by the value of +task.fault."""
    return {run_json(run)["swept"][0].partition("=")[2]: run for run in runs(folder)}


def fault_of(run: Path) -> str:
    """Return what `logs` says about a run that has failed."""
    return " ".join(run_module("hpctrain", "logs", str(run)).stdout.split())


@pytest.fixture
def packed(train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Train:
    """A function that submits runs with the task Packed."""
    (tmp_path / "packed.py").write_text(PACKED)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    size = ("train.max_steps=200", "checkpoint.every_steps=20", "tracking=off")

    def submit(*arguments: str) -> Completed:
        return train("-m", "task._target_=packed.Packed", "parallel.device=cpu", *size, *arguments)

    return submit


@pytest.mark.slurm
@pytest.mark.usefixtures("empty_queue")
def test_three_runs_share_a_whole_node(packed: Train, tmp_path: Path) -> None:
    """One fails, one is killed and starts again, one is left alone."""
    whole = ("launch.mem_gb=2", "+site.sbatch.exclusive=true")
    packed("+task.fault=none,error,kill", "launch.pack=3", "train.max_steps=60", *whole)
    (job,) = {*cluster.job_ids(tmp_path / "runs")}
    # The job fails as one of its runs has failed.
    assert cluster.wait_for_end([job]) == {job: "FAILED"}
    found = by_fault(tmp_path / "runs")
    records = {fault: run_json(run) for fault, run in found.items()}
    assert {fault: record["state"] for fault, record in records.items()} == {
        "none": "finished",
        "error": "failed",
        "kill": "finished",
    }
    verdicts = {
        fault: [one.get("verdict") for one in record["attempts"]]
        for fault, record in records.items()
    }
    assert verdicts == {"none": [None], "error": ["failed"], "kill": ["restart", None]}
    keys = [
        (one["restart_count"], one["step_id"])
        for record in records.values()
        for one in record["attempts"]
    ]
    assert sorted(keys) == [(0, 0), (0, 1), (0, 2), (0, 3)]
    assert records["kill"]["attempts"][1]["first_step"] == 20
    assert "ValueError: as asked" in records["error"]["attempts"][0]["error"]
    said = (found["kill"] / "logs" / f"{job}.batch.log").read_text()
    assert "another one begins" in said
    assert "another one begins" not in (found["none"] / "logs" / f"{job}.batch.log").read_text()
    fields = ("sacct", "--noheader", "--parsable2", f"--jobs={job}", "--format=AllocTRES")
    shares = cluster.slurm(*fields).splitlines()
    assert shares[0].startswith("billing=8,cpu=8")
    assert all("cpu=1" in share for share in shares[2:])
    assert "ValueError: as asked" in fault_of(found["error"])
