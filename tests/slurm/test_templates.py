"""The sbatch templates do their work when they are submitted to a real Slurm."""

import functools
import json
import os
import re
import shutil
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import cluster
from tests.cluster import Paced
from tests.conftest import ROOT, copy_store, run_json, runs

pytestmark = [pytest.mark.slurm, pytest.mark.usefixtures("empty_queue")]
SLURM = ROOT / "slurm"
HAND_ON = f'exec {sys.executable} "$@"'  # the end of a script that replaces Python
QUIET = ("tracking=off", "train.eval_every=100000", "train.log_every=1000")


def steps(count: int) -> tuple[str, ...]:
    """Return config overrides for a slow run of `count` steps, which a test can interrupt."""
    size = ("train.max_epochs=999", f"train.max_steps={count}", "checkpoint.every_steps=20")
    return (*QUIET, *size, Paced.task)


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """Return a folder from which jobs are submitted; a shell could misread its name."""
    folder = tmp_path / "it's $(touch oops) & mine"
    folder.mkdir()
    return folder


def submit(here: Path, *words: str, python: str | None = sys.executable, **env: str) -> str:
    """Run `sbatch WORDS` in the folder `here`, and return the job id.

    A word NAME.sbatch means the template of that name. `python` is the value of HPCTRAIN_PYTHON.
    """
    given = [str(SLURM / word) if word.endswith(".sbatch") else word for word in words]
    done = subprocess.run(
        ["sbatch", "--parsable", *given],
        cwd=here,
        env=os.environ | ({"HPCTRAIN_PYTHON": python} if python else {}) | env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def output(here: Path, job: str) -> str:
    """Return what a job, or a task of an array, has written to its output file."""
    return (here / f"slurm-{job}.out").read_text()


def ended(here: Path, *jobs: str) -> list[str]:
    """Wait until the jobs have ended; return their states, such as `COMPLETED|0:0`.

    The states and the outputs of the jobs are also printed, which helps when a test fails.
    """
    cluster.wait_for_end(list(jobs))
    shown = ("sacct", "-X", "--noheader", "--parsable2", "--format=State,ExitCode")
    known = ("squeue", "--states=all", "--noheader", "--format=%T")

    def accounted(job: str) -> str:
        """Return what the accounting has; "" as long as it has only an earlier start of the job."""
        answer = cluster.slurm(*shown, "--jobs", job)
        return answer if answer.startswith(cluster.slurm(*known, f"--jobs={job}")) else ""

    answers = [
        cluster.wait_for(functools.partial(accounted, job), 60, f"the accounting of {job}")
        for job in jobs
    ]
    print(*answers, *(output(here, job) for job in jobs), sep="\n")
    return answers


def come_back(job: str, paced: Paced | None = None) -> None:
    """Wait until the job is requeued, and let it start at once.

    If `paced` is given, the run goes on at full speed.
    """
    cluster.wait_for(lambda: cluster.job_state(job) == "PENDING", 180, "the requeue")
    if paced is not None:
        paced.go()
    hurried = cluster.tool("hurry", job)
    assert hurried.returncode == 0, hurried.stderr


def the_run(here: Path) -> Path:
    """Wait for the run directory, which must be the only one, and return it."""
    (run,) = cluster.wait_for(lambda: runs(here / "runs"), 180, "the run directory")
    return run


def script(path: Path, text: str) -> Path:
    """Write an executable bash script, and return its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(0o755)
    return path


def test_without_arguments_the_usage_is_shown(here: Path) -> None:
    templates = sorted(path.name for path in SLURM.glob("*.sbatch"))
    assert len(templates) == 5
    # The array templates also get this output name: running them without an array is wrong use.
    plain = "--output=slurm-%j.out"
    jobs = [submit(here, plain, name) for name in templates]
    jobs += [submit(here, plain, name, "--help") for name in templates]
    assert ended(here, *jobs) == ["FAILED|2:0"] * len(jobs)
    for name, job in zip(templates * 2, jobs, strict=True):
        assert f" slurm/{name} " in output(here, job)
        assert "#" not in output(here, job)
    assert {path.suffix for path in here.iterdir()} == {".out"}


def test_the_python_is_found(here: Path) -> None:
    def environment(name: str) -> str:
        script(here / name / "bin" / "python", f"echo this is {name} >&2; exit 9")
        return str(here / name)

    active = {"VIRTUAL_ENV": environment("active"), "CONDA_PREFIX": environment("conda")}
    first = submit(here, "train.sbatch", "seed=1", python=None, **active)
    cluster.wait_for_end([first])
    environment(".venv")
    second = submit(here, "train.sbatch", "seed=1", python=None, **active)
    given = environment("given") + "/bin/python"
    third = submit(here, "train.sbatch", "seed=1", python=given, **active)
    assert ended(here, first, second, third) == ["FAILED|9:0"] * 3
    said = [output(here, job).strip() for job in (first, second, third)]
    assert said == ["this is active", "this is .venv", "this is given"]


def test_train_over_two_nodes(digits: Path, here: Path) -> None:
    spy = script(here / "spy", f'echo "$CUDA_VISIBLE_DEVICES" >gpus-$SLURM_PROCID\n{HAND_ON}')
    shape = ("--nodes=2", "--ntasks-per-node=2", "--gpus-per-node=2", "train.sbatch")
    folder = here / "a 'b'; $(touch oops) *"
    given = ("experiment=digits", f"data.path={digits}", f'output_dir="{folder}"', *QUIET)
    size = ("train.max_steps=20", "parallel.device=cpu")  # the GPUs are fake ones
    job = submit(here, *shape, *given, *size, python=str(spy))
    assert ended(here, job) == ["COMPLETED|0:0"]
    (run,) = runs(folder)
    assert run_json(run)["state"] == "finished"
    attempt = run_json(run)["attempts"][-1]
    assert (attempt["world_size"], len(attempt["hosts"])) == (4, 2)
    assert [(here / f"gpus-{rank}").read_text() for rank in range(4)] == ["0,1\n"] * 4
    assert not list(here.rglob("oops"))
    assert stat.S_IMODE((here / f"slurm-{job}.run").stat().st_mode) == 0o600


def test_a_wrong_config_ends_before_any_step(here: Path) -> None:
    typo = submit(here, "train.sbatch", "experiment=digits", "optimizer.lrr=1")
    sweep = submit(here, "train.sbatch", "experiment=digits", "--cfg", "job")
    assert ended(here, typo, sweep) == ["FAILED|2:0"] * 2
    assert "did you mean optimizer.lr?" in output(here, typo)
    assert "not the config of one run" in output(here, sweep)
    steps = cluster.slurm("sacct", "--noheader", "--format=JobID", "--jobs", f"{typo},{sweep}")
    assert not re.search(r"\.\d", steps)


@pytest.mark.slow
def test_preempted_on_two_nodes_it_comes_back_with_its_frozen_config(
    digits: Path, here: Path, paced: Paced
) -> None:
    experiment = here / "conf" / "experiment" / "mine.yaml"
    experiment.parent.mkdir(parents=True)
    text = "# @package _global_\ndefaults: [digits, _self_]\ntrain: {max_epochs: 20}\n"
    experiment.write_text(text)
    shape = ("--partition=preemptible", "--nodes=2", "train.sbatch")
    given = ("--config-dir", "conf", "experiment=mine", f"data.path={digits}", *QUIET)
    job = submit(here, *shape, *given, paced.task)
    cluster.wait_for_step(the_run(here), 50)
    experiment.write_text(text.replace("20", "1"))
    preempted = cluster.tool("preempt", job)
    assert preempted.returncode == 0, preempted.stderr
    come_back(job, paced)
    assert ended(here, job) == ["COMPLETED|0:0"]
    record = run_json(the_run(here))
    assert record["result"]["step"] == 440
    first, second = record["attempts"]
    assert (first["state"], first["reason"]) == ("interrupted", "SIGTERM")
    assert (second["restart_count"], second["state"]) == (1, "finished")


@pytest.mark.slow
def test_array_trains_a_run_a_line(digits: Path, here: Path) -> None:
    lines = ("seed=1", "seed=2 'model.hidden=[8, 8]' output_dir='\"$(touch oops) `id`\"'")
    wrong = ("seed='3", "optimizer.lrr=1", "")
    (here / "my runs.txt").write_text("\n".join([*lines, *wrong]))
    given = ("experiment=digits", f"data.path={digits}", "train.max_steps=3", "tracking=off")
    job = submit(here, "--array=1-6", "array.sbatch", "my runs.txt", *given)
    missing = submit(here, "--array=1", "array.sbatch", "none.txt", *given)
    tasks = [f"{job}_{task}" for task in range(1, 7)]
    done = ["COMPLETED|0:0"] * 2
    assert ended(here, *tasks, f"{missing}_1") == [*done, *["FAILED|2:0"] * 5]
    said = [output(here, task) for task in tasks]
    assert "seed='3: No closing quotation" in said[2]
    assert "did you mean optimizer.lr?" in said[3]
    for text, number in zip(said[4:], (5, 6), strict=True):
        assert f"my runs.txt: line {number}, for this task, is empty or missing" in text
    assert "the file has 4 lines" in said[5]
    assert f"none.txt: no such file in {here}" in output(here, f"{missing}_1")
    (first,), (second,) = runs(here / "runs"), runs(here / "$(touch oops) `id`")
    assert (run_json(first)["state"], run_json(second)["state"]) == ("finished", "finished")
    assert "hidden:\n  - 8\n  - 8\n" in (second / "config.yaml").read_text()
    assert not list(here.rglob("oops"))


# A request with the password of the environment, if there is one; it prints the answer as JSON.
ASK = """\
import base64, json, os, sys, urllib.error, urllib.request
url, body = sys.argv[1:]
user, password = (os.environ.get("MLFLOW_TRACKING_" + name) for name in ("USERNAME", "PASSWORD"))
headers = {"Content-Type": "application/json"}
if password:
    headers["Authorization"] = "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()
try:
    with urllib.request.urlopen(urllib.request.Request(url, body.encode(), headers)) as answer:
        print(json.dumps([answer.status, answer.read().decode()]))
except urllib.error.HTTPError as error:
    print(json.dumps([error.code, error.read().decode()]))
"""


@pytest.mark.slow
def test_mlflow_server_serves_other_nodes(digits: Path, empty_store: Path, here: Path) -> None:
    pytest.importorskip("flask_wtf", reason="Flask-WTF (mlflow[auth]) is not installed")
    address = here / "my store" / "server.uri"
    address.parent.mkdir()
    # The server would take seconds to create its store, as the other tests see mlflow do it.
    copy_store(empty_store, address.with_name("mlflow.db"))

    def start() -> tuple[str, str]:
        job = submit(here, "--nodelist=node1", "mlflow-server.sbatch", "my store")
        cluster.wait_for(
            lambda: address.exists() or cluster.job_state(job) == "FAILED", 180, "the address"
        )
        assert address.exists(), output(here, job)
        return job, address.read_text().strip()

    def secrets() -> dict[str, str]:
        """Return the variables that a shell gets from the file with the password."""
        file = address.with_name("server.env")
        assert file.stat().st_mode & 0o777 == 0o600
        found = dict(re.findall(r"export (\w+)=(\S+)", file.read_text()))
        assert len(found.pop("MLFLOW_TRACKING_PASSWORD")) >= 32
        assert found == {"MLFLOW_TRACKING_USERNAME": "hpctrain"}
        shell = ("sh", "-c", '. "$1"; env', "sh", str(file))
        lines = subprocess.check_output(shell, text=True).splitlines()
        return dict(line.split("=", 1) for line in lines if line.startswith("MLFLOW_TRACKING_"))

    def ask(node: str, url: str, body: object, **env: str) -> tuple[int, dict[str, Any]]:
        """Return the status and the JSON of an answer that a process on a node gets."""
        srun = ("srun", f"--nodelist={node}", sys.executable, "-c", ASK, url, json.dumps(body))
        status, content = json.loads(cluster.slurm(*srun, env=os.environ | env))
        return status, json.loads(content) if content.startswith("{") else {}

    def names(uri: str) -> list[str]:
        """Return the names of the runs that the server lists.

        Another node asks it by its host name, and its own node by `localhost`, as through a tunnel.
        """
        found = []
        local = re.sub("//.*:", "//localhost:", uri)
        for node, seen_as in (("node2", uri), ("node1", local)):
            url, body = f"{seen_as}/api/2.0/mlflow/runs/search", {"experiment_ids": ["0", "1"]}
            status, answer = ask(node, url, body, **secrets())
            assert status == 200
            found.append([run["info"]["run_name"] for run in answer.get("runs", [])])
        assert found[0] == found[1]
        return found[0]

    server, uri = start()
    assert re.fullmatch(r"http://node1:\d+", uri)
    assert f"tracking.uri={uri}" in output(here, server)
    second = submit(here, "mlflow-server.sbatch", "my store")
    assert ended(here, second) == ["FAILED|1:0"]
    assert f"my store already has a server: {uri}" in output(here, second)

    # Somebody without the password cannot write where only the owner may, nor delete anything.
    victim = here / "home"
    created = {"name": "x", "artifact_location": victim.as_uri()}
    for call, body in (("create", created), ("delete", {"experiment_id": "0"})):
        for password in ({}, {"MLFLOW_TRACKING_PASSWORD": "wrong"}):
            known = {"MLFLOW_TRACKING_USERNAME": "hpctrain"} | password
            url = f"{uri}/api/2.0/mlflow/experiments/{call}"
            assert ask("node2", url, body, **known)[0] == 401
    assert not victim.exists()

    given = ("experiment=digits", f"data.path={digits}", "train.max_steps=5", f"tracking.uri={uri}")
    given += ("tracking.drain_s=60",)
    job = submit(here, "--nodelist=node2", "train.sbatch", *given, **secrets())
    assert ended(here, job) == ["COMPLETED|0:0"]
    run = the_run(here).name
    assert names(uri) == [run]

    # Slurm sends this signal a minute before the time limit.
    cluster.slurm("scancel", "--batch", "--signal=TERM", server)
    assert ended(here, server) == ["COMPLETED|0:0"]
    assert not address.exists()
    server, uri = start()
    assert names(uri) == [run]
    cluster.slurm("scancel", server)
    assert ended(here, server)[0].startswith("CANCELLED")
    cluster.wait_for(lambda: not address.exists(), 60, "the address is gone")
    assert "Finished server process" in output(here, server)


# The tests start no container, because Apptainer is not available where they run. This script has
# only its command line: it checks the options and runs the command on the host, with a PATH that
# lacks Slurm's commands, as in the image. The tests do not cover mounts, user namespaces, the
# effect of --nv, and how Apptainer forwards signals.
FAKE_APPTAINER = """\
[[ $1 == exec ]] || exit 64
echo "${{*//$'\\n'/;}}" >>{log}
shift
while [[ $1 == -* ]]; do
    case $1 in
        --bind | --pwd) [[ $2 == "$PWD" ]] || exit 64; shift 2 ;;
        --nv) shift ;;
        *) echo "unknown option $1"; exit 64 ;;
    esac
done
[[ -s $1 && -z ${{PYTHONPATH:-}} ]] || exit 64
shift
exec /usr/bin/env PATH={path} PYTHONPATH={pythonpath} "$@"
"""


@pytest.mark.slow  # a container of a sweep comes back in test_site_cluster.py
def test_container(digits: Path, here: Path, paced: Paced) -> None:
    log = here.parent / "apptainer.log"
    (here / "my image.sif").write_text("an image")
    fake = FAKE_APPTAINER.format(
        log=log, path=Path(sys.executable).parent, pythonpath=os.environ.get("PYTHONPATH", "")
    )
    folder = script(here.parent / "bin" / "apptainer", fake).parent
    path = {"PATH": f"{folder}:{os.environ['PATH']}"}
    given = ("container.sbatch", "my image.sif", "experiment=digits", f"data.path={digits}")
    given += ("parallel.device=cpu",)  # the GPUs are fake ones
    shape = ("--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=2")
    job = submit(here, *shape, *given, *steps(400), **path)
    cluster.wait_for_step(the_run(here), 20)
    cluster.slurm("scancel", "--signal=USR2", job)
    come_back(job, paced)
    assert ended(here, job) == ["COMPLETED|0:0"]
    first, second = run_json(the_run(here))["attempts"]
    assert (first["reason"], first["world_size"]) == ("SIGUSR2", 2)
    assert (second["state"], second["restart_count"]) == ("finished", 1)
    assert f"job {job} is requeued by its batch script" in output(here, job)
    # The config is frozen once for both attempts, and each attempt has two ranks.
    calls = log.read_text().splitlines()
    made = [re.findall(r" -m (hpctrain \w+|[\w.]+)", call)[0] for call in calls]
    ranks = ["hpctrain.cluster.slurm.steps", "hpctrain run", "hpctrain run"]
    assert made == ["hpctrain freeze", *ranks, "hpctrain.engine.job.verdict", *ranks]
    assert all(" --nv " in call for call in calls)


def test_container_without_a_runtime(here: Path) -> None:
    if shutil.which("apptainer") or shutil.which("singularity"):
        pytest.skip("a container runtime is installed here")
    job = submit(here, "container.sbatch", "image.sif", "experiment=digits")
    assert ended(here, job) == ["FAILED|2:0"]
    assert "neither apptainer nor singularity is on the PATH of node" in output(here, job)
