"""The sbatch script on a real Slurm: how Slurm reads it, what ranks see, how they come back."""

import json
import shlex
import sqlite3
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from hpctrain.commands import cancel
from hpctrain.config.composing.compose import compose as compose_config
from hpctrain.config.frozen import load
from hpctrain.config.schema import Config, DataConfig, SiteConfig
from hpctrain.runs.state.facts import gather
from hpctrain.runs.state.state import judge
from hpctrain.slurm.queue import call
from hpctrain.slurm.script import sbatch_script
from tests import cluster
from tests.cluster import Paced
from tests.conftest import ROOT, Completed, copy_store, only_run, run_json, run_module, runs

pytestmark = [pytest.mark.slurm, pytest.mark.usefixtures("empty_queue")]
Train = Callable[..., Completed]


def wait_for_end(job: str) -> str:
    return cluster.wait_for(
        lambda: state if (state := cluster.job_state(job)) in cluster.ENDED else "",
        180,
        f"the end of {job}",
    )


@pytest.fixture
def ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[], dict[int, dict[str, str]]]:
    """Have every rank of a step write its environment to a file at the start of its Python.

    The processes that a rank starts inherit its number, so only the first of them writes.

    Returns:
        A function that returns the environments by rank.
    """
    folder = tmp_path / "spy"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(
        "import contextlib, json, os\n"
        "if {'SLURM_ARRAY_JOB_ID', 'SLURM_STEP_ID'} <= os.environ.keys():\n"
        f"    file = '{folder}/' + os.environ['SLURM_PROCID']\n"
        "    with contextlib.suppress(FileExistsError), open(file, 'x') as opened:\n"
        "        json.dump(dict(os.environ), opened)\n"
        "    if 'ONLY_LOOK' in os.environ: os._exit(0)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(folder), prepend=":")
    return lambda: {
        int(file.name): json.loads(file.read_text()) for file in sorted(folder.glob("[0-9]"))
    }


def test_slurm_reads_back_what_was_written(tmp_path: Path) -> None:
    for ugly in (
        "plain",
        "spaces  and, commas = signs",
        "\"double\" 'single' `touch x` $(touch x) $HOME",
        "back\\slash \\\" \\' \\n \\\\",
        "#SBATCH --hold; hetjob # packjob",
        "%j %A %% -dash --wrap=x :colon",
        "ünï😀 \u2028 ~ * ? {a,b} ! (x) <y> |z& [1-2]",
    ):
        config = Config(
            data=DataConfig(path="/data"), site=SiteConfig(sbatch={"comment": ugly, "hold": True})
        )
        script = tmp_path / "job.sh"
        script.write_text(sbatch_script(config, tmp_path, 1))
        job = cluster.slurm("sbatch", "--parsable", str(script))
        shown = cluster.slurm("scontrol", "show", "job", job)
        assert f"   Comment={ugly} \n" in shown
        assert f"   StdOut={tmp_path}/batch/{job}_4294967294.log\n" in shown


@pytest.mark.parametrize(
    "file",
    [  # those of real sites name a page; tests/slurm/test_script.py compares their lines with it
        pytest.param(file, id=file.stem, marks=[pytest.mark.slow] * ("https:" in file.read_text()))
        for file in sorted((ROOT / "conf/site").glob("*.yaml"))
    ],
)
def test_slurm_takes_every_site(file: Path, tmp_path: Path) -> None:
    # The values that this cluster does not have are removed: names, features and typed GPUs.
    names = ("partition", "account", "qos", "constraint", "gpu_type")
    shape = ["launch.mem_gb=8", "launch.tasks_per_node=2", "launch.gpus_per_node=2"]
    here = [f"site.{name}=null" for name in names]
    here += ["site.sbatch.gres=null"] * (file.stem == "mahti")
    config = compose_config(["experiment=digits", f"site={file.stem}", *shape, *here])
    assert config is not None
    script = tmp_path / "job.sh"
    script.write_text(sbatch_script(config, tmp_path, 2))
    cluster.slurm("sbatch", "--test-only", str(script))


@pytest.mark.parametrize(
    ("option", "mask"),
    [
        ("gpus-per-node", "0,1"),
        ("srun", "0,1"),  # an exclusive job, whose GPUs no option of sbatch requests
        pytest.param("gres", "0,1", marks=pytest.mark.slow),
        pytest.param("gpus-per-task", "0,1", marks=pytest.mark.slow),
        pytest.param("none", None, marks=pytest.mark.slow),
    ],
)
def test_every_rank_sees_the_right_gpus(
    train: Train,
    ranks: Callable[[], dict[int, Any]],
    option: str,
    mask: str | None,
) -> None:
    shape = ["launch.nodes=2", "launch.tasks_per_node=2", "launch.gpus_per_node=2"]
    shape += ["+site.sbatch.exclusive=true"] if option in ("srun", "none") else []
    given = ("train.max_steps=2", "tracking=off", "launch.wait=true", *shape)
    # The ranks end as soon as they have seen their GPUs; the next test trains with GPUs.
    train("-m", *given, f"site.gpu_option={option}", code=4, ONLY_LOOK="1")
    seen = ranks()
    assert [seen[rank].get("CUDA_VISIBLE_DEVICES") for rank in range(4)] == [mask] * 4
    assert [seen[rank]["SLURM_DISTRIBUTION"] for rank in range(4)] == ["block:block"] * 4


@pytest.mark.slow
def test_submitting_from_inside_an_allocation(
    digits: Path, tmp_path: Path, ranks: Callable[[], dict[int, dict[str, str]]]
) -> None:
    hostile = {
        "SLURM_CPU_BIND": "quiet,mask_cpu:0x1",
        "SLURM_CPU_BIND_TYPE": "mask_cpu:",
        "SLURM_NTASKS": "9",
        "SLURM_NTASKS_PER_NODE": "9",
        "SLURM_CPUS_PER_TASK": "8",
        "SLURM_MEM_PER_CPU": "9999999",
        "SLURM_MEM_PER_NODE": "9999999",
        "SLURM_GPUS_PER_TASK": "7",
        "SLURM_EXPORT_ENV": "NONE",
        "SLURM_STEP_ID": "77",
        "SLURM_PROCID": "5",
        "SLURM_HINT": "nomultithread",
        "SLURM_DISTRIBUTION": "arbitrary",
        "SBATCH_PARTITION": "none_such",
        "SBATCH_ACCOUNT": "none_such",
        "SBATCH_EXPORT": "NONE",
        "SBATCH_GPUS_PER_TASK": "7",
        "SBATCH_TIMELIMIT": "0:01",
        "SRUN_CPUS_PER_TASK": "1",
        "SRUN_NTASKS": "9",
        "CUDA_VISIBLE_DEVICES": "1",
        "PMI_RANK": "5",
        "PMI_SIZE": "9",
        "PMIX_RANK": "5",
        "PMIX_SERVER_URI": "x",
        "OMPI_COMM_WORLD_SIZE": "9",
        "OMPI_MCA_orte_hnp_uri": "x",
        "RANK": "5",
        "WORLD_SIZE": "9",
        "LOCAL_RANK": "5",
        "MASTER_ADDR": "192.0.2.1",
        "MASTER_PORT": "1",
        "TORCHELASTIC_RUN_ID": "x",
        "OMP_NUM_THREADS": "64",
        "HPCTRAIN_REQUEUE_NOTE": "/none",
    }
    exports = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in hostile.items())
    shape = ["launch.tasks_per_node=2", "launch.gpus_per_node=2", "launch.cpus_per_task=2"]
    where = [f"data.path={digits}", f"output_dir={tmp_path}/runs", "launch.mem_gb=2"]
    # The GPUs are fake ones.
    size = ["train.max_steps=3", "tracking=off", "parallel.device=cpu"]
    arguments = ["experiment=digits", *size, *shape, *where]
    command = shlex.join([sys.executable, "-m", "hpctrain", "-m", *arguments])
    allocation = ["--nodes=2", "--ntasks-per-node=4", "--cpus-per-task=2", "--gpus-per-node=1"]
    outer = cluster.sbatch(exports + command, *allocation, f"--output={tmp_path}/out")
    assert wait_for_end(outer) == "COMPLETED", (tmp_path / "out").read_text()
    (run,) = runs(tmp_path / "runs")
    job = cluster.job_id(run)
    assert wait_for_end(job) == "COMPLETED"
    attempt = run_json(run)["attempts"][-1]
    assert (attempt["launcher"], attempt["world_size"]) == ("slurm", 2)

    seen = ranks()
    assert sorted(seen) == [0, 1]
    for rank, env in seen.items():
        given = {
            "SLURM_PROCID": str(rank),
            "SLURM_LOCALID": str(rank),
            "SLURM_STEP_ID": "0",
            "SLURM_STEP_NUM_TASKS": "2",
            "SLURM_NTASKS": "2",
            "SLURM_CPUS_PER_TASK": "2",
            "SLURM_CPUS_ON_NODE": "4",
            "SLURM_MEM_PER_NODE": "2048",
            "SLURM_JOB_PARTITION": "batch",
            "CUDA_VISIBLE_DEVICES": "0,1",
            "OMP_NUM_THREADS": "2",
        }
        assert {name: env.get(name) for name in given} == given
        # The ranks see Slurm's own values for this job, and none of the other allocation.
        leaked = {name for name, value in hostile.items() if env.get(name) == value}
        assert leaked == set()
        foreign = ("SBATCH_", "PMIX_", "OMPI_", "TORCHELASTIC_", "MASTER_")
        assert not [name for name in env if name.startswith(foreign)]


@pytest.mark.slow
def test_an_ugly_output_dir_trains_to_the_end(
    digits: Path, empty_store: Path, tmp_path: Path
) -> None:
    ugly = 'it\'s "my" $(touch x) `touch x`; touch x & ünï😀 #1 * ~ {a,b} | <y> ' + "long " * 27
    assert len(ugly) > 200
    folder = tmp_path / ugly / "runs"
    folder.mkdir(parents=True, mode=0o700)
    store = copy_store(empty_store, folder / "mlflow.db")
    quoted = str(folder).replace("'", "\\'")
    run_module(
        "hpctrain", "-m", "experiment=digits", "train.max_steps=2", "launch.wait=true",
        "tracking.drain_s=60", f"data.path={digits}", f"output_dir='{quoted}'", cwd=tmp_path,
    )  # fmt: skip
    (run,) = runs(folder)
    record = run_json(run)
    assert record["state"] == "finished"
    log = run / "logs" / f"{cluster.job_id(run)}.rank0.log"
    assert "step 2" in log.read_text()
    assert [path.name for path in folder.glob("sweeps/*/array-0/batch/*")] == [
        f"{cluster.job_id(run)}.log"
    ]
    assert [path.name for path in tmp_path.iterdir()] == [ugly]
    with closing(sqlite3.connect(store)) as uploaded:
        assert uploaded.execute("SELECT name, status FROM runs").fetchall() == [
            (run.name, "FINISHED")
        ]


def test_paths_that_slurm_cannot_write_to_are_refused(train: Train, tmp_path: Path) -> None:
    for part in ("100%j", "back\\\\slash"):
        folder = f"{tmp_path}/{part}"
        done = train("-m", "tracking=off", f"output_dir='{folder}'", code=2)
        assert "in the path of a log as a pattern" in done.stderr
        assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_failing_setup_stops_the_job_and_a_trap_keeps_the_exit_code(
    train: Train, tmp_path: Path
) -> None:
    marks = tmp_path / "marks"
    for number, (setup, broken) in enumerate(
        (("true", "model.in_features=3"), ("ls /none", "seed=1"))
    ):
        train(
            "-m", "train.max_steps=2", "tracking=off", broken, f"output_dir={tmp_path}/{number}",
            f"site.setup=[\"trap 'echo done >>{marks}' EXIT\", '{setup}']",
        )  # fmt: skip
        (run,) = runs(tmp_path / str(number))
        job = cluster.job_id(run)
        assert wait_for_end(job) == "FAILED"
        assert marks.read_text() == "done\n" * (number + 1)
        code = cluster.slurm("sacct", "-X", "-n", "-P", "-j", job, "-o", "ExitCode")
        assert code == "2:0"  # of a ConfigError, and of ls
    (log,) = tmp_path.glob("1/sweeps/*/array-0/batch/*.log")
    assert "site.setup: ls /none failed with exit code 2; the ranks were not" in log.read_text()


# There is no container runtime here. This stand-in hides the scheduler's commands from the command
# that it runs, as a container would.
APPTAINER = """\
#!/bin/bash
echo "apptainer $*"
while [[ $1 != *.sif ]]; do shift; done
shift
PATH=/nowhere exec "$@"
"""


@pytest.fixture
def in_apptainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Overrides for runs in a container, which is the stand-in above."""
    commands = tmp_path / "bin"
    commands.mkdir()
    (commands / "apptainer").write_text(APPTAINER)
    (commands / "apptainer").chmod(0o755)
    monkeypatch.setenv("PATH", str(commands), prepend=":")
    image = f"site.container.image={tmp_path}/image.sif"
    return ["site.container.runtime=apptainer", image, f"site.container.python={sys.executable}"]


@pytest.mark.slow
def test_a_container_comes_back_after_a_preemption(
    train: Train, tmp_path: Path, in_apptainer: list[str], paced: Paced
) -> None:
    size = ["train.max_epochs=16", "checkpoint.every_steps=20", "tracking=off"]
    train("-m", *size, paced.task, "site.partition=preemptible", *in_apptainer)
    (run,) = runs(tmp_path / "runs")
    job = cluster.job_id(run)
    cluster.wait_for_step(run, 40)
    assert cluster.tool("preempt", job).returncode == 0
    cluster.wait_for(lambda: cluster.job_state(job) == "PENDING", 180, "the requeue")
    first = run_json(run)["attempts"][0]
    assert (first["state"], first["reason"]) == ("interrupted", "SIGTERM")
    log = (run / "logs" / f"{job}.rank0.log").read_text()
    assert f"--bind={tmp_path} " in log
    assert "the batch script was asked to requeue the job" in log
    paced.go()
    assert cluster.tool("hurry", job).returncode == 0
    assert wait_for_end(job) == "COMPLETED"
    assert [attempt["restart_count"] for attempt in run_json(run)["attempts"]] == [0, 1]
    assert not (run / "requeue").exists()


@pytest.mark.slow  # test_templates.py cancels a container, too
def test_a_cancelled_container_saves_and_stays_away(
    train: Train, tmp_path: Path, in_apptainer: list[str], paced: Paced
) -> None:
    size = ["train.max_epochs=2000", "checkpoint.every_steps=20", "tracking=off"]
    train("-m", *size, paced.task, *in_apptainer)
    (run,) = runs(tmp_path / "runs")
    job = cluster.job_id(run)
    cluster.wait_for_step(run, 20)
    cluster.slurm("scancel", job)
    assert wait_for_end(job) == "CANCELLED"
    cluster.wait_for(lambda: run_json(run)["state"] == "interrupted", 60, "the save")
    log = run / "logs" / f"{job}.rank0.log"
    # The ranks asked for a requeue, and the batch script saw that the job was cancelled.
    cluster.wait_for(lambda: "the batch script was asked" in log.read_text(), 60, "an answer")
    assert not cluster.slurm("squeue", "--noheader", "--me")


@pytest.fixture
def preempting() -> Iterator[Callable[[str, int], None]]:
    """A function that sets how the partition `preemptible` treats the jobs that it preempts."""

    def change(mode: str, grace_s: int) -> None:
        settings = (f"PreemptMode={mode}", f"GraceTime={grace_s}")
        call("scontrol", "update", "PartitionName=preemptible", *settings).check_returncode()

    yield change
    change("REQUEUE", 10)


def state_of(run: Path) -> tuple[str, str]:
    """Return the state of a run and the reason, as `status` shows them."""
    state = judge(*gather([run]), time.time())
    return state.name, state.reason


SITE = ("train.max_epochs=16", "checkpoint.every_steps=20", "tracking=off", Paced.task)
SITE += ("site.partition=preemptible",)


def test_a_chain_goes_on_where_slurm_cancels(
    train: Train, tmp_path: Path, paced: Paced, preempting: Callable[[str, int], None]
) -> None:
    preempting("CANCEL", 0)
    done = train("-m", *SITE)
    assert "the partition preemptible cancels jobs that are preempted at once" in done.stderr
    run = only_run(tmp_path)
    jobs = gather([run])[0].chain  # sacct shows a job that never began as `4_[0]`, not as `4_0`
    assert len(jobs) == 3
    cluster.wait_for_step(run, 20)
    assert cluster.tool("preempt", f"{jobs[0]}_0").returncode == 0
    cluster.wait_for(lambda: len(run_json(run)["attempts"]) == 2, 180, "the second job")
    assert state_of(run)[0] == "running"
    paced.go()
    cluster.wait_for(lambda: run_json(run)["state"] == "finished", 180, "the end")
    assert [*map(wait_for_end, jobs)] == ["PREEMPTED", "COMPLETED", "CANCELLED"]
    first, second = run_json(run)["attempts"]
    assert [each["job_id"] for each in (first, second)] == [f"{job}_0" for job in jobs[:2]]
    assert second["first_step"] >= 20
    assert state_of(run) == ("finished", "")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "grace_s", "requeue"), [("REQUEUE", 0, 1), ("CANCEL", 10, 1), ("REQUEUE", 10, 0)]
)
def test_a_preempted_job_is_requeued(
    mode: str,
    grace_s: int,
    requeue: int,
    train: Train,
    tmp_path: Path,
    paced: Paced,
    preempting: Callable[[str, int], None],
) -> None:
    preempting(mode, grace_s)
    train("-m", *SITE)
    run = only_run(tmp_path)
    job = cluster.job_id(run)
    cluster.wait_for_step(run, 20)
    # As `sbatch --no-requeue` and JobRequeue=0 leave it.
    cluster.slurm("scontrol", "update", f"JobId={job}", f"Requeue={requeue}")
    assert cluster.tool("preempt", job).returncode == 0
    cluster.wait_for(lambda: cluster.job_state(job) == "PENDING", 180, "the requeue")
    paced.go()
    assert cluster.tool("hurry", job).returncode == 0
    assert wait_for_end(job) == "COMPLETED"
    assert [attempt["restart_count"] for attempt in run_json(run)["attempts"]] == [0, 1]


@pytest.mark.slow
def test_what_ends_a_chain(
    train: Train, tmp_path: Path, paced: Paced, preempting: Callable[[str, int], None]
) -> None:
    preempting("CANCEL", 0)
    train("-m", *SITE, "launch.chain=3", "seed=1,2,3,4")
    by_seed = {load(run / "config.yaml").seed: run for run in runs(tmp_path / "runs")}
    chains = {seed: gather([run])[0].chain for seed, run in by_seed.items()}
    for run in by_seed.values():
        cluster.wait_for_step(run, 20)
    # The second and the third job get no node meanwhile.
    others = cluster.sbatch("sleep 600", "--nodes=4", "--exclusive", "--partition=batch")
    assert {wait_for_end(chain[0]) for chain in chains.values()} == {"PREEMPTED"}
    name, reason = state_of(by_seed[1])
    assert name == "requeued"
    assert "link 2 of 3 waits: " in reason
    # By `cancel`, and by scancel of one of them.
    assert cancel.main([str(by_seed[1])]) == 0
    cluster.slurm("scancel", chains[2][1])
    # By a failure of its own.
    paced.fail()
    cluster.slurm("scancel", others)
    assert [*map(wait_for_end, chains[1])] == ["PREEMPTED", "CANCELLED", "CANCELLED"]
    assert [*map(wait_for_end, chains[2])] == ["PREEMPTED", "CANCELLED", "FAILED"]
    for chain in (chains[3], chains[4]):
        assert [*map(wait_for_end, chain)] == ["PREEMPTED", "FAILED", "CANCELLED"]
    assert len(run_json(by_seed[1])["attempts"]) == len(run_json(by_seed[2])["attempts"]) == 1
    assert not cluster.queue()


@pytest.mark.slow
def test_without_a_chain_no_job_waits(
    train: Train, tmp_path: Path, paced: Paced, preempting: Callable[[str, int], None]
) -> None:
    preempting("CANCEL", 0)
    done = train("-m", *SITE, "launch.chain=1")
    assert "with launch.chain=1 a run waits until `python -m hpctrain resume` goes on" in " ".join(
        done.stderr.split()
    )
    run = only_run(tmp_path)
    job = cluster.job_id(run)
    cluster.wait_for_step(run, 20)
    assert cluster.tool("preempt", job).returncode == 0
    assert wait_for_end(job) == "PREEMPTED"
    cluster.wait_for(lambda: not gather([run])[0].held, 60, "the end of the rank")
    name, reason = state_of(run)
    # On a busy machine the run is killed before it has saved.
    assert name == "lost" or (name == "interrupted" and "no job waits: `resume`" in reason)
