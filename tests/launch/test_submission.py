"""Submitting on a real Slurm: each run is queued exactly once, with the code that was submitted."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import cluster
from tests.conftest import NET, Completed, linked_python, run_json, run_module, runs

pytestmark = [pytest.mark.slurm, pytest.mark.usefixtures("empty_queue")]
Train = Callable[..., Completed]
HELD = "+site.sbatch.hold=true"


@pytest.fixture
def wrapper(tmp_path: Path) -> Callable[[str, str], str]:
    """A function that puts a script around a Slurm command and returns a PATH with it first."""

    def make(name: str, text: str) -> str:
        real = cluster.slurm("which", name)
        folder = tmp_path / "bin"
        folder.mkdir(exist_ok=True)
        check = '[[ $1 == --test-only ]] && exec "$real" "$@"'  # the wrapper is for submissions
        (folder / name).write_text(f"#!/bin/bash\nreal={real}\n{check}\n{text}\n")
        (folder / name).chmod(0o755)
        return f"{folder}:{os.environ['PATH']}"

    return make


def test_what_is_queued_is_what_was_typed(digits: Path, tmp_path: Path) -> None:
    """The code, the configs and the environment's Python change while the job waits."""
    project = tmp_path / "project"
    (project / "conf" / "experiment").mkdir(parents=True)
    model, experiment = project / "my_net.py", project / "conf" / "experiment" / "mine.yaml"
    model.write_text(NET + 'print("WIDTH 1 from", __file__, flush=True)\n')
    experiment.write_text(
        "# @package _global_\ndefaults:\n  - digits\n  - _self_\nname: mine\n"
        "model:\n  _target_: my_net.Net\n"
        "train: {max_steps: 3}\ntracking: {enabled: false}\n"
    )
    subprocess.run(["git", "init", "-q", "."], cwd=project, check=True)
    # The environment's Python is a link, which an upgrade changes.
    python = linked_python(tmp_path / "env")
    where = [f"data.path={digits}", f"output_dir={tmp_path}/runs", f"--config-dir={project}/conf"]
    done = subprocess.run(
        [str(python), "-m", "hpctrain", "-m", "experiment=mine", *where, HELD],
        cwd=project,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (run,) = runs(tmp_path / "runs")
    (job,) = cluster.job_ids(tmp_path / "runs")
    before = run_json(run)
    assert before["config_dir"] == f"{project}/conf"
    model.write_text("raise RuntimeError('edited after submission')\n")
    experiment.write_text(experiment.read_text().replace("max_steps: 3", "max_steps: 7"))
    python.unlink()
    python.symlink_to(Path(sys.executable).resolve())
    cluster.slurm("scontrol", "release", job)
    assert cluster.wait_for_end([job]) == {job: "COMPLETED"}
    record = run_json(run)
    assert (record["state"], record["result"]["step"]) == ("finished", 3)
    (log,) = run.glob("logs/*.rank0.log")
    assert (
        f"WIDTH 1 from {tmp_path}/runs/code/{before['code']}/project/my_net.py" in log.read_text()
    )
    assert (run / "provenance" / "git.json").exists()


def test_a_submitter_killed_in_the_middle_neither_loses_nor_doubles(
    train: Train, digits: Path, tmp_path: Path, wrapper: Callable[[str, str], str]
) -> None:
    common = ("seed=1,2,3", "train.max_steps=2", "tracking=off", HELD)
    where = [f"data.path={digits}", f"output_dir={tmp_path}/runs"]
    command = [sys.executable, "-m", "hpctrain", "-m", "experiment=digits", *where, *common]

    def kill_in_sbatch(path: str) -> None:
        process = subprocess.Popen(
            command, env=os.environ | {"PATH": path}, stderr=subprocess.DEVNULL, cwd=tmp_path
        )
        cluster.wait_for((tmp_path / "reached").exists, 180, "sbatch")
        process.kill()
        process.wait()
        (tmp_path / "reached").unlink()

    # The submitter dies before sbatch has reached the controller: nothing is queued, although the
    # runs are noted as queued.
    path = wrapper(
        "sbatch", f"touch {tmp_path}/reached; sleep 1000 & echo $! >{tmp_path}/pid; wait"
    )
    kill_in_sbatch(path)
    assert [run_json(run)["state"] for run in runs(tmp_path / "runs")] == ["queued"] * 3
    assert cluster.queue() == []
    # The orphaned sbatch holds the submit lock, because it may still submit.
    waiting = subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, cwd=tmp_path, env=os.environ
    )
    assert waiting.stderr is not None
    said = ""
    while "another submission into" not in said:
        line = waiting.stderr.readline()
        assert line, said
        said += line
    with pytest.raises(subprocess.TimeoutExpired):
        waiting.wait(timeout=1)
    assert cluster.queue() == []
    os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)
    said += waiting.communicate(timeout=120)[1]
    assert waiting.returncode == 0, said
    assert len(cluster.queue()) == 3
    cluster.slurm("scancel", "--me")
    cluster.wait_for(lambda: not cluster.queue(), 180, "an empty queue")

    # sbatch has submitted the job, but its answer never arrives.
    path = wrapper("sbatch", f'"$real" "$@" >{tmp_path}/answer; touch {tmp_path}/reached; sleep 3')
    kill_in_sbatch(path)
    assert len(cluster.queue()) == 3
    done = train("-m", *common)
    assert done.stderr.count("pending already") == 3
    assert len(cluster.queue()) == 3


def test_two_terminals_at_the_same_moment(digits: Path, tmp_path: Path) -> None:
    where = [f"data.path={digits}", f"output_dir={tmp_path}/runs", "tracking=off", HELD]
    command = [sys.executable, "-m", "hpctrain", "-m", "experiment=digits", "seed=range(0,6)"]
    both = [
        subprocess.Popen([*command, *where], stderr=subprocess.PIPE, text=True, cwd=tmp_path)
        for _ in range(2)
    ]
    said = [process.communicate(timeout=120)[1] for process in both]
    assert [process.returncode for process in both] == [0, 0], said
    assert len(cluster.queue()) == 6
    assert sorted(text.count("pending already") for text in said) == [0, 6]


FULL = """sbatch: error: Slurm temporarily unable to accept job, sleeping and retrying
sbatch: error: Batch job submission failed: Resource temporarily unavailable"""
TIMED_OUT = "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation"


def test_an_answer_that_never_came_is_looked_up(
    train: Train, tmp_path: Path, wrapper: Callable[[str, str], str]
) -> None:
    path = wrapper("sbatch", f'"$real" "$@" >/dev/null; echo "{TIMED_OUT}" >&2; exit 1')
    done = train("-m", "seed=1,2", "tracking=off", HELD, PATH=path)
    assert "queued" in done.stderr
    assert sorted(cluster.queue()) == sorted(cluster.job_ids(tmp_path / "runs"))
    assert len(cluster.queue()) == 2


def test_what_a_full_queue_leaves_is_kept_and_submitted_by_the_same_command(
    train: Train, tmp_path: Path, wrapper: Callable[[str, str], str]
) -> None:
    # sbatch itself has waited for two minutes. Two of three runs share the first array.
    refusal = f'echo "{FULL}" >&2; exit 1'
    path = wrapper("sbatch", f'if [[ -e asked ]]; then {refusal}; fi; touch asked; "$real" "$@"')
    command = ("-m", "seed=1,2,3", "launch.pack=2", "tracking=off", HELD)
    done = train(*command, code=4, PATH=path)
    assert "error: 2 of 3 runs queued, 1 not: the cluster has no room" in done.stderr
    states = [run_json(run)["state"] for run in runs(tmp_path / "runs")]
    assert sorted(states) == ["created", "queued", "queued"]
    assert train(*command).stderr.count("pending already") == 2
    assert {run_json(run)["state"] for run in runs(tmp_path / "runs")} == {"queued"}


def test_a_controller_that_does_not_answer_stops_before_anything_is_written(
    train: Train, tmp_path: Path, wrapper: Callable[[str, str], str]
) -> None:
    path = wrapper("squeue", "echo 'Unable to contact slurm controller' >&2; exit 1")
    done = train("-m", "seed=1,2", "tracking=off", HELD, code=4, PATH=path)
    assert "squeue does not answer" in done.stderr
    path = wrapper("scontrol", "echo 'Unable to contact slurm controller' >&2; exit 1")
    done = train("-m", "seed=1,2", "tracking=off", code=4, PATH=path)
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: Slurm's controller does not answer")
    assert "hydra/launcher=submitit_local" in line
    # A dry run needs no controller.
    done = train("-m", "seed=1,2", "tracking=off", "launch.dry_run=true", PATH=path)
    assert "not checked whether the jobs can start" in done.stderr
    assert done.stderr.count("would be submitted") == 2
    assert "#SBATCH --array=0-1" in done.stdout
    assert not (tmp_path / "runs").exists()
    assert not cluster.queue()


def test_a_second_look_is_taken_before_a_job_is_sent_again(
    train: Train, tmp_path: Path, wrapper: Callable[[str, str], str]
) -> None:
    """If sbatch and then squeue time out, it is not known whether the job was submitted."""
    wrapper("sbatch", f'"$real" "$@" >/dev/null; echo "{TIMED_OUT}" >&2; touch mute; exit 1')
    path = wrapper("squeue", '[[ -e mute ]] || exec "$real" "$@"; rm mute; exit 1')
    done = train("-m", "seed=1,2", "tracking=off", HELD, PATH=path)
    assert "queued" in done.stderr
    assert len(cluster.queue()) == 2


def test_how_people_look_at_the_queue_hides_no_job(train: Train) -> None:
    look = {"SQUEUE_STATES": "RUNNING", "SQUEUE_PARTITION": "none", "SLURM_CLUSTERS": "other"}
    look["LOGNAME"] = "nobody"  # the state after `su`
    train("-m", "tracking=off", HELD, **look)
    assert "pending already" in train("-m", "tracking=off", HELD, **look).stderr
    assert len(cluster.queue()) == 1


def test_a_job_that_is_being_requeued_is_not_doubled(
    train: Train, wrapper: Callable[[str, str], str]
) -> None:
    """Slurm shows a job as completing until its previous start is cleaned up."""
    train("-m", "tracking=off", HELD)
    path = wrapper("squeue", '"$real" "$@" | sed "s/|PENDING|/|COMPLETING|/"')
    assert "completing already" in train("-m", "tracking=off", HELD, PATH=path).stderr
    assert len(cluster.queue()) == 1


def test_a_run_that_ends_while_we_look_is_not_done_again(
    train: Train, tmp_path: Path, wrapper: Callable[[str, str], str]
) -> None:
    common = ("-m", "tracking=off", "train.max_steps=2")
    train(*common)
    ended = f"grep -q finished {tmp_path}/runs/*/run.json && [[ -z $($real -h --me) ]]"
    path = wrapper("squeue", f'until {ended}; do sleep 0.2; done; exec "$real" "$@"')
    assert "finished before" in train(*common, PATH=path).stderr
    assert not cluster.queue()


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small file system")
def test_a_full_disk_leaves_nothing_behind(digits: Path, tmp_path: Path) -> None:
    (tmp_path / "small").mkdir()
    sweep = f"experiment=digits seed=range(0,200) data.path={digits} output_dir=small/runs {HELD}"
    program = (
        "mount -t tmpfs -o size=1m tmpfs small; "
        f"{sys.executable} -m hpctrain -m '{sweep.replace(' ', chr(39) + ' ' + chr(39))}' "
        "launch.snapshot=off; echo $?; find small"
    )
    done = subprocess.run(
        ["unshare", "--mount", "bash", "-c", program], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.stdout.split() == ["6", "small"], done.stderr
    assert "No space left on device" in done.stderr
    assert not cluster.queue()


def test_a_preemption_before_python_has_begun_loses_nothing(train: Train, tmp_path: Path) -> None:
    slow = tmp_path / "slow"
    slow.mkdir()
    (slow / "sitecustomize.py").write_text(
        "import os, time\nif os.environ.get('SLURM_STEP_ID', '').isdigit(): time.sleep(40)\n"
    )
    path = f"{os.environ.get('PYTHONPATH', '')}:{slow}"
    train("-m", "tracking=off", "train.max_steps=2", "site.partition=preemptible", PYTHONPATH=path)
    (job,) = cluster.job_ids(tmp_path / "runs")
    cluster.wait_for(lambda: cluster.job_state(job) == "RUNNING", 180, "the job's start")
    time.sleep(3)
    cluster.tool("preempt", job)
    cluster.wait_for(lambda: cluster.job_state(job) == "PENDING", 180, "the requeue")


@pytest.mark.slow
def test_data_that_was_exchanged_meanwhile_is_refused(
    train: Train, digits: Path, tmp_path: Path
) -> None:
    data = tmp_path / "data"
    shutil.copytree(digits, data)
    train("-m", "tracking=off", "train.max_steps=2", f"data.path={data}", HELD)
    (run,) = runs(tmp_path / "runs")
    (job,) = cluster.job_ids(tmp_path / "runs")
    run_module("data_prep", "sample", "stdlib", str(data), "--overwrite")
    cluster.slurm("scontrol", "release", job)
    assert cluster.wait_for_end([job]) == {job: "FAILED"}
    (log,) = run.glob("logs/*.rank0.log")
    assert "error: data.path" in log.read_text()


def test_checking_asks_the_scheduler_and_shows_the_start(train: Train, tmp_path: Path) -> None:
    done = train("-m", "seed=1,2", "launch.dry_run=true")
    assert "2 runs like digits-" in done.stderr
    assert "to start at 20" in done.stderr
    assert done.stderr.count("would be submitted") == 2
    assert not cluster.queue()
    done = train("-m", "seed=1,2", "launch.nodes=9", "train.global_batch_size=72", code=4)
    assert "launch.nodes=9: it needs 9 nodes with 1 CPU each" in done.stderr
    assert "such nodes in the partition batch: 4 (sbatch: " in done.stderr
    done = train("-m", "launch.gpus_per_node=2", "site.gpu_type=h100", code=4)
    assert "it needs 1 node with 1 CPU, 2 h100 GPUs each" in done.stderr
    assert not cluster.queue()
    assert not (tmp_path / "runs").exists()


def test_nodes_that_are_down_now_refuse_no_job(train: Train) -> None:
    cluster.slurm("scontrol", "update", "nodename=node1", "state=drain", "reason=test")
    try:
        done = train("-m", "tracking=off", "launch.nodes=4", HELD)
        assert "not now, it will wait" in done.stderr
        assert len(cluster.queue()) == 1
    finally:
        cluster.slurm("scontrol", "update", "nodename=node1", "state=resume")


def test_what_is_sent_is_what_the_dry_run_prints(train: Train, tmp_path: Path) -> None:
    train("-m", "seed=1,2", "tracking=off", HELD)
    (sent,) = (tmp_path / "runs").glob("sweeps/*/array-0/job.sh")
    shown = train("-m", "seed=1,2", "tracking=off", HELD, "launch.dry_run=true").stdout
    stamp = sent.parents[1].name
    lines = [line for line in shown.splitlines() if "/sweeps/" not in line]
    assert lines == [line for line in sent.read_text().splitlines() if stamp not in line]


@pytest.mark.slow
def test_what_is_submitted_later_keeps_to_max_running_too(train: Train, tmp_path: Path) -> None:
    limit = ("tracking=off", "launch.max_running=1", HELD)
    train("-m", "seed=1,2", *limit)
    train("-m", "seed=1,2,3", *limit)
    first, second = sorted({job.partition("_")[0] for job in cluster.job_ids(tmp_path / "runs")})
    shown = cluster.slurm("scontrol", "show", "job", second)
    assert f"Dependency=afterany:{first}_*" in shown
