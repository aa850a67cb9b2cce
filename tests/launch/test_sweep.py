"""What a sweep does before it uses a scheduler: composing, arrays and names."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.utils import create_config_search_path
from hydra.core.config_store import ConfigStore
from hydra.types import RunMode
from omegaconf import OmegaConf

from hpctrain.base.files.yaml_file import conf_dir
from hpctrain.base.names.run_record import AttemptRecord, RunRecord
from hpctrain.cluster.slurm import partition_limit
from hpctrain.cluster.slurm.queue import Queue
from hpctrain.commands.select import runs_of
from hpctrain.config.composing.compose_sweep import Composer
from hpctrain.config.frozen import dump
from hpctrain.config.identity import run_path
from hpctrain.config.schema import Config
from hpctrain.errors import ConfigError
from hpctrain.launch.arrays import plan
from hpctrain.launch.entry import Entry, Status, set_states
from hpctrain.launch.sweeps.before_queueing import check_bounds
from hpctrain.launch.sweeps.sweep import name_apart
from hpctrain.runs.code import provenance
from hpctrain.runs.run_dir import RunDir
from tests.conftest import Completed, run_json, runs

Train = Callable[..., Completed]


@pytest.fixture
def loader(tmp_path: Path) -> ConfigLoaderImpl:
    ConfigStore.instance().store(name="schema", node=Config)
    return ConfigLoaderImpl(create_config_search_path(str(conf_dir())))


@pytest.mark.parametrize(
    "overrides",
    [
        ["experiment=digits", "optimizer.lr=2e-3"],
        ["optimizer.lr=2e-3", "experiment=digits", "optimizer=sgd", "seed=3"],
        ["experiment=digits", "+optimizer.options.betas=[0.9,0.99]", "train.clip_norm=null"],
        ["experiment=digits", "model.hidden=[8]", "model={dropout: 0.5}", "+model.extra=1"],
        ["experiment=digits", "~model.dropout", "metric='${name}/${data.val_split}'"],
        ["experiment=digits", "++data.path=/y", "+site.env.A='1'", "debug=fast", "site=example"],
        ["experiment=digits", "data.path=${oc.env:HOME}/x", "hydra.job.chdir=true", "seed=1"],
    ],
)
def test_composing_fast_is_composing_as_hydra_does(
    loader: ConfigLoaderImpl, overrides: list[str]
) -> None:
    master = loader.load_configuration("config", [], run_mode=RunMode.MULTIRUN)
    master.hydra.job.config_name = "config"
    expected = loader.load_sweep_config(master, overrides)
    del expected.__dict__["_content"]["hydra"]
    composer = Composer(loader, master)
    composer([*overrides, "seed=77"])  # the base config, which both calls share, must not change
    for resolve in (False, True):
        got = OmegaConf.to_container(composer(overrides), resolve=resolve)
        assert got == OmegaConf.to_container(expected, resolve=resolve)


def entries(folder: Path, count: int, **launch: object) -> list[Entry]:
    configs = [Config(seed=seed, output_dir=str(folder)) for seed in range(count)]
    for config in configs:
        for name, value in launch.items():
            setattr(config.launch, name, value)
    return [Entry([f"seed={c.seed}"], c, RunDir(run_path(c, "digest"), "digest")) for c in configs]


def test_a_queued_run_is_a_folder_and_two_files(tmp_path: Path) -> None:
    """Clusters limit the number of files, folders and links."""
    some = entries(tmp_path, 40)
    sweep = tmp_path / "sweeps" / "2026"
    (array,) = plan(some, sweep, 100)
    array.write({"uid": "u", "name": "sweep"})
    shared = len(list((sweep / "provenance").iterdir()))
    owned = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*"))
    assert len(owned) == 3 * 40 + 2 + 4 + 1 + shared, owned
    run = some[7].run
    assert sorted(os.listdir(run.path)) == ["config.yaml", "run.json"]
    record = run.read()
    assert (record.state, record.sweep) == ("queued", {"uid": "u", "name": "sweep"})
    assert runs_of(sweep) == [entry.run.path for entry in some]
    rest = array.halve(sweep / "array-1")
    assert (len(array.entries), len(rest.entries)) == (20, 20)
    assert runs_of(sweep) == [entry.run.path for entry in some[:20]]
    # The job makes the folders and takes over the provenance, once.
    run.begin_attempt()
    provenance.take_over(run.provenance, Path(str(record.provenance)))
    provenance.take_over(run.provenance, Path(str(record.provenance)))
    assert provenance.changes(run.provenance) == []
    assert provenance.origin(run.provenance) == provenance.origin(sweep / "provenance")
    kept = {*os.listdir(run.path)} - {".run.json.lock"}
    assert kept == {"checkpoints", "config.yaml", "logs", "provenance", "run.json"}
    # A run that is frozen again keeps its uid.
    some[7].run.freeze(dump(some[7].config), state="created")
    assert run.read().uid == record.uid
    assert len(run.read().attempts) == 1


def test_arrays_are_cut_at_the_limit_and_keep_the_order(tmp_path: Path) -> None:
    some = entries(tmp_path, 10)
    arrays = plan(some, tmp_path, 4)
    assert [len(array.entries) for array in arrays] == [4, 4, 2]
    assert [entry for array in arrays for entry in array.entries] == some
    assert [array.folder.name for array in arrays] == ["array-0", "array-1", "array-2"]
    assert {array.max_running for array in arrays} == {None}


def test_runs_with_other_resources_are_another_array(tmp_path: Path) -> None:
    arrays = plan(entries(tmp_path, 3) + entries(tmp_path, 2, nodes=2), tmp_path, 100)
    assert [len(array.entries) for array in arrays] == [3, 2]
    assert "--nodes=2" in arrays[1].text()


@pytest.mark.parametrize(("count", "size", "limit"), [(10, 4, 7), (1000, 100, 30), (9, 2, 2)])
def test_all_arrays_together_keep_to_max_running(
    tmp_path: Path, count: int, size: int, limit: int
) -> None:
    arrays = plan(entries(tmp_path, count, max_running=limit), tmp_path, size)
    # Of each chain, one array runs at any time.
    first = [array for array in arrays if array.after is None]
    assert sum(array.max_running or 0 for array in first) <= limit
    assert len(first) == min(limit, len(arrays))
    assert all((array.max_running or 0) >= 1 for array in arrays)


@pytest.mark.parametrize(
    ("launch", "hours"),
    [
        ({"gpus_per_node": 2}, "6 GPU-hours"),
        ({"gpus_per_node": 1, "gpus_per_run": 0.5, "spares": 1}, "3 GPU-hours"),
        ({"nodes": "1-2", "tasks_per_node": 4, "chain": 3}, "72 rank-hours"),
    ],
)
def test_a_budget_bounds_the_time_limits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, launch: dict[str, object], hours: str
) -> None:
    monkeypatch.setattr(partition_limit, "cluster_config", lambda: None)
    some = entries(tmp_path, 3, time_min=60, budget_gpu_hours=100.0, **launch)
    jobs = [(entry.config, 1) for entry in some]
    check_bounds(jobs)
    some[1].config.launch.budget_gpu_hours = 2.9
    with pytest.raises(ConfigError, match=rf"budget_gpu_hours=2\.9: .* may take {hours}"):
        check_bounds(jobs)


def test_a_budget_stops_a_submission(train: Train, tmp_path: Path) -> None:
    budget = ("launch.gpus_per_node=1", "parallel.device=cpu", "launch.budget_gpu_hours=1.5")
    done = train("-m", "seed=1,2", *budget, "launch.dry_run=true", code=2)
    assert "may take 2 GPU-hours, so nothing was queued" in done.stderr
    assert not (tmp_path / "runs").exists()


def test_rerun(train: Train, tmp_path: Path) -> None:
    common = ("train.max_steps=2", "tracking=off")
    train(*common)
    (run,) = runs(tmp_path / "runs")
    uid = run_json(run)["uid"]
    train(*common, "launch.rerun=all")  # tests/job/test_train.py repeats it without
    kept, again = sorted([run.with_name(run.name + ".1"), run], key=lambda p: -len(p.name))
    assert run_json(kept)["uid"] == uid
    assert run_json(again)["uid"] != uid
    assert {run_json(path)["state"] for path in (kept, again)} == {"finished"}
    assert (run / "provenance" / "git.json").exists()


@pytest.mark.parametrize(("rerun", "status"), [("none", Status.LEFT), ("failed", Status.OPEN)])
def test_only_runs_that_were_never_started(tmp_path: Path, rerun: str, status: Status) -> None:
    config = Config()
    config.launch.rerun = rerun
    failed = RunRecord(state="failed", attempts=(AttemptRecord(),))
    begun = Entry([], config, RunDir(tmp_path / "begun"), before=failed)
    new = Entry([], config, RunDir(tmp_path / "new"))
    set_states([begun, new], Queue())
    assert [entry.status for entry in (begun, new)] == [status, Status.OPEN]


def test_a_batch_is_refused_for_a_sweep_is_checked_whole(train: Train, tmp_path: Path) -> None:
    wrong = ("-m", "seed=1,2,-1", "hydra.sweeper.max_batch_size=2", "launch.dry_run=true")
    assert "launch.max_running=2" in train(*wrong, code=2).stderr
    assert not (tmp_path / "runs").exists()


def test_a_sweep_over_resources_has_an_array_and_a_name_for_each(
    train: Train, tmp_path: Path, no_sbatch: dict[str, str]
) -> None:
    shape = ("launch.nodes=1,2,4", "launch.dry_run=true", "launch.snapshot=off")
    done = train("-m", "seed=1,2", *shape, **no_sbatch)
    nodes = [line for line in done.stdout.splitlines() if line.startswith("#SBATCH --nodes")]
    assert nodes == [f"#SBATCH --nodes={count}" for count in (1, 2, 4)]
    assert done.stdout.count("#SBATCH --array=0-1\n") == 3
    assert "6 runs differ only in launch.nodes" in done.stderr
    some = entries(tmp_path, 2) + entries(tmp_path, 2, nodes=2)
    for entry in some:
        entry.config.site.partition = "a b"
    name_apart(some)
    names = [entry.run.name.rpartition("-")[0] for entry in some]
    assert names == ["run-nodes1"] * 2 + ["run-nodes2"] * 2
    assert len({entry.run.path for entry in some}) == 4
    alike = entries(tmp_path, 1) + entries(tmp_path, 1)
    name_apart(alike)
    assert {entry.config.name for entry in alike} == {"run"}


def test_a_container_is_given_the_data_of_each_of_its_runs(tmp_path: Path) -> None:
    some = entries(tmp_path, 2)
    some[1].config.data.path = "/elsewhere/data"
    assert len(plan(some, tmp_path, 100)) == 1
    for entry in some:
        entry.config.site.container.runtime = "apptainer"
        entry.config.site.container.image = "x.sif"
    first, second = plan(some, tmp_path, 100)
    assert "/elsewhere/data" not in first.text()
    assert "--bind=/elsewhere/data" in second.text()


def test_a_dry_run_that_one_run_asks_for_is_meant_for_all(train: Train, tmp_path: Path) -> None:
    assert "#!/bin/bash" in train("-m", "launch.dry_run=false,true", "tracking=off").stdout
    assert not (tmp_path / "runs").exists()


def test_a_folder_and_a_link_to_it_are_one(
    train: Train, tmp_path: Path, no_sbatch: dict[str, str]
) -> None:
    (tmp_path / "link").symlink_to("runs")
    places = f"output_dir={tmp_path}/runs,{tmp_path}/link"
    done = train("-m", "tracking=off", "train.max_steps=2", places, **no_sbatch)
    assert "the same run as" in done.stderr
    (run,) = runs(tmp_path / "runs")
    assert len(run_json(run)["attempts"]) == 1
