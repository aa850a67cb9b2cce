"""The sbatch script on a real Slurm: how Slurm reads it, what ranks see, how they come back."""

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hpctrain.cluster.slurm.queue import call
from hpctrain.cluster.slurm.script import sbatch_script
from hpctrain.commands.facts import gather
from hpctrain.commands.state import state_of
from hpctrain.config.composing.compose import compose as compose_config
from hpctrain.config.job_request import JobRequest
from hpctrain.config.schema import Config, DataConfig, SiteConfig
from tests import cluster
from tests.cluster import Paced
from tests.conftest import ROOT, Completed, journal_metrics, only_run, run_json, runs

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
        script.write_text(sbatch_script(JobRequest.of(config), tmp_path, 1))
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
    here += [f"++site.sbatch.{name}=null" for name in ("gres", "licenses", "reservation")]
    config = compose_config(["experiment=digits", f"site={file.stem}", *shape, *here])
    assert config is not None
    script = tmp_path / "job.sh"
    script.write_text(sbatch_script(JobRequest.of(config), tmp_path, 2))
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
    train: Train, tmp_path: Path, ranks: Callable[[], dict[int, Any]], option: str, mask: str | None
) -> None:
    shape = ["launch.nodes=2", "launch.tasks_per_node=2", "launch.gpus_per_node=2"]
    shape += ["+site.sbatch.exclusive=true"] if option in ("srun", "none") else []
    # The ranks end as soon as they have seen their GPUs; the next test trains with GPUs.
    given = ("train.max_steps=2", "tracking=off", *shape, f"site.gpu_option={option}")
    train("-m", *given, ONLY_LOOK="1")
    cluster.wait_for_end(cluster.job_ids(tmp_path / "runs"))
    seen = ranks()
    assert [seen[rank].get("CUDA_VISIBLE_DEVICES") for rank in range(4)] == [mask] * 4
    assert [seen[rank]["SLURM_DISTRIBUTION"] for rank in range(4)] == ["block:block"] * 4


@pytest.fixture
def preempting() -> Iterator[Callable[[str, int], None]]:
    """A function that sets how the partition `preemptible` treats the jobs that it preempts."""

    def change(mode: str, grace_s: int) -> None:
        settings = (f"PreemptMode={mode}", f"GraceTime={grace_s}")
        call("scontrol", "update", "PartitionName=preemptible", *settings).check_returncode()

    yield change
    change("REQUEUE", 10)


def shown_state(run: Path) -> tuple[str, str]:
    """Return the state of a run and the reason, as `status` shows them."""
    state = state_of(*gather([run]), time.time())
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
    assert shown_state(run)[0] == "running"
    paced.go()
    cluster.wait_for(lambda: run_json(run)["state"] == "finished", 180, "the end")
    assert [*map(wait_for_end, jobs)] == ["PREEMPTED", "COMPLETED", "CANCELLED"]
    first, second = run_json(run)["attempts"]
    assert [each["job_id"] for each in (first, second)] == [f"{job}_0" for job in jobs[:2]]
    assert second["first_step"] >= 20
    assert shown_state(run) == ("finished", "")


@pytest.mark.slow  # the whole environment of these tests is packed: gigabytes
def test_an_environment_travels_and_trains_the_same(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two ranks of a real job import everything from the node, and give the same losses."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    losses = {}
    for environment in ("shared", "image"):
        options = (f"launch.environment={environment}", f"output_dir={environment}", "seed=1")
        train(
            "-m", *options, "launch.tasks_per_node=2", "launch.wait=true", "tracking.upload=false"
        )
        (run,) = runs(tmp_path / environment)
        losses[environment] = journal_metrics(run)
        assert "of 60 minutes used" in run_json(run)["attempts"][-1]["waste"]
    assert losses["image"] == losses["shared"]
    (copy,) = (path for path in tmp_path.glob("hpctrain-*/*") if (path / "environment").is_dir())
    assert (copy / "unpacked").exists()
