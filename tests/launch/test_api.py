"""hpctrain from Python, without a cluster."""

import subprocess
import sys
from pathlib import Path

import pytest
import submitit
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra

import hpctrain
from hpctrain.base.files.yaml_file import conf_dir
from hpctrain.cluster.slurm import sbatch
from hpctrain.config.composing import compose as command_line
from hpctrain.config.composing.compose_sweep import composed
from hpctrain.config.launcher_keys import INSTEAD, NOT_NEEDED, READ_AS
from hpctrain.errors import ConfigError, LaunchError, StorageError
from hpctrain.launch.functions.function import LocalFunctionJob
from hpctrain.launch.jobs import LocalRunJob, RunJob
from hpctrain.launch.sweeps.sweep import Sweep
from tests import forkserver
from tests.conftest import journal_metrics, run_json, run_module


@pytest.fixture
def where(digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Overrides of a call whose runs are in tmp_path/runs, in a place without a scheduler."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(subprocess, "Popen", forkserver.Popen)  # ranks start in milliseconds
    return ["experiment=digits", f"data.path={digits}", f"output_dir={tmp_path}/runs"]


def test_importing_it_is_cheap_and_train_is_both_function_and_package() -> None:
    program = (
        "import sys, hpctrain\n"
        "heavy = {'torch', 'mlflow', 'submitit', 'hydra', 'numpy'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "import hpctrain.engine.supervised.schedule\n"
        "try: hpctrain.train('-m')\n"
        "except hpctrain.errors.ConfigError as error: print(error)\n"
        "print(sorted(set(dir(hpctrain)) & {'submit', 'train', 'load_run', 'submit_function'}))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "'-m': an override is text" in done.stdout
    assert "['load_run', 'submit', 'submit_function', 'train']" in done.stdout
    with pytest.raises(AttributeError, match="nothing"):
        hpctrain.nothing  # type: ignore[attr-defined]  # noqa: B018


def test_runs_here_are_jobs_of_submitit_and_hydra_is_left_alone(
    where: list[str], tmp_path: Path
) -> None:
    size = ["train.max_steps=3", "tracking.upload=false", "launch.snapshot=off"]
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        jobs = hpctrain.submit(*where, *size, "model.in_features=64,3")
        assert GlobalHydra.instance().is_initialized()
        ConfigStore.instance()  # the schema is stored, so that a notebook can compose by itself
        assert compose("config", ["experiment=digits"]).name == "digits"
    good, bad = jobs
    assert isinstance(good, LocalRunJob)
    record = run_json(good.run.path)
    assert good.result() == record["result"]["val/accuracy"]
    assert [job.state for job in jobs] == ["COMPLETED", "FAILED"]
    assert [job.done() for job in jobs] == [True, True]
    assert "step 3/3" in (good.stdout() or "")
    assert good.paths.stdout == good.run.logs / f"{good.job_id}_0_log.out"
    with pytest.raises(LaunchError, match=r"is failed, not finished: see /.*logs \(RuntimeError"):
        bad.result()
    # Nothing is pickled, and the same call finds the finished run.
    assert not list((tmp_path / "runs").rglob("*.pkl"))
    (again,) = hpctrain.submit(*where, *size)
    assert isinstance(again, RunJob)
    assert (again.job_id, again.state, again.result()) == ("", "COMPLETED", good.result())
    assert again.get_info() == {"State": "COMPLETED"}
    assert list(submitit.helpers.as_completed([again, good])) == [again, good]

    run = hpctrain.load_run(good.run.path)
    assert run.config.train.max_steps == 3
    table = {
        (key, step): value
        for step, key, value in run.metrics.itertuples(index=False)
        if not key.startswith("perf/")
    }
    assert table == journal_metrics(good.run.path)
    assert run.checkpoints == [3]
    model = run.model()
    assert not model.training
    assert run.model(step=3).state_dict().keys() == model.state_dict().keys()
    with pytest.raises(StorageError, match="no checkpoint of step 7; there are: 3"):
        run.model(step=7)
    with pytest.raises(StorageError, match="no run directory"):
        hpctrain.load_run(tmp_path)


def test_training_here_returns_the_metric_and_goes_on_after_ctrl_c(
    where: list[str], tmp_path: Path
) -> None:
    (tmp_path / "calls.py").write_text(
        "import glob, os, signal, threading, time\n"
        "import torch\n"
        "import hpctrain\n"
        f"given = {[*where, 'train.max_epochs=9999', 'tracking=off']}\n"
        "def interrupt():\n"
        "    while not glob.glob('runs/*/checkpoints/step-????????'): time.sleep(0.1)\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "threading.Thread(target=interrupt).start()\n"
        "try: hpctrain.train(*given)\n"
        "except KeyboardInterrupt as stop: print('stopped:', stop)\n"
        "run = hpctrain.load_run(*glob.glob('runs/digits-*'))\n"
        "print(run.state, run.metrics.empty)\n"
        f"given = {[*where, 'train.max_steps=3', 'tracking=off']}\n"
        "print(hpctrain.train(*given) == hpctrain.train(*given) is not None)\n"
    )
    done = run_module("calls", cwd=tmp_path)
    assert "has saved; the same call goes on from there" in done.stdout
    assert "\ninterrupted True\n" in done.stdout
    assert done.stdout.count("is finished already") == 1
    assert done.stdout.endswith("True\n")


def test_a_call_expands_and_refuses_as_the_command_line(where: list[str], tmp_path: Path) -> None:
    with composed([*where, "optimizer.lr=1e-3,3e-3", "seed=range(0,3)"], None) as call:
        assert len(call.runs) == 6
        assert call.folder.parent == tmp_path / "runs" / "sweeps"
        configs = [call.composer.typed(run) for run in call.runs]
    assert {(c.optimizer.lr, c.seed) for c in configs} == {
        (lr, seed) for lr in (1e-3, 3e-3) for seed in (0, 1, 2)
    }
    for wrong, words in {
        ("optimizer.lrr=1",): "did you mean optimizer.lr",
        ("-m", "seed=1"): "'-m': an override is text",
        ("--config-dir", "x"): "config_dir=FOLDER is an argument of this function",
        (3,): "3: an override is text",
        ("seed=0,-5",): "1 of 2 runs are wrong; nothing was queued",
        ("seed=1,2", "hydra/sweeper=optuna"): "belong to the command line",
        ("experiment=none_such",): "no such choice",
        ("launch.nodes=2",): "sbatch is not on the PATH",
    }.items():
        with pytest.raises(ConfigError, match=words):
            hpctrain.submit(*where, *wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="2 runs; train runs one, submit several"):
        hpctrain.train(*where, "seed=1,2")
    with pytest.raises(ConfigError, match="config_dir=nowhere: no such folder"):
        hpctrain.submit(*where, config_dir="nowhere")
    assert not (tmp_path / "runs").exists()


def test_a_function_runs_here_without_a_cluster(
    where: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = (
        "import os\n"
        "def rank(x): return x, os.environ['RANK'], os.environ.get('CUDA_VISIBLE_DEVICES')\n"
    )
    (tmp_path / "function_of_a_user.py").write_text(program)
    monkeypatch.syspath_prepend(tmp_path)
    from function_of_a_user import rank  # type: ignore[import-not-found]

    # On a cluster, this launcher makes it run here, too.
    monkeypatch.setattr(sbatch, "available", lambda: True)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", mask := "GPU-3f2a,GPU-77c1")
    place = [where[2], "launch.snapshot=off", "hydra/launcher=submitit_local"]
    job = hpctrain.submit_function(rank, (1, 2), tasks_per_node=2, overrides=place)
    first = [[1, 2], "0", mask]
    assert job.results() == [first, [[1, 2], "1", mask]]
    assert (job.result(), job.state, job.done()) == (first, "COMPLETED", True)
    (folder,) = (tmp_path / "runs" / "functions").iterdir()
    next(folder.glob("results/1.json")).unlink()
    monkeypatch.setattr(LocalFunctionJob, "state", "TIMEOUT")
    with pytest.raises(LaunchError, match=r"the job is TIMEOUT \(launch\.time_min was over; a fun"):
        job.results()
    for wrong, words in {
        "train.max_steps=3": "for a function there are launch, site",
        "launch.time_min=1,2": "2 jobs; give single values",
        "launch.nodes=1-3": "a function needs one number",
        "launch.gpus_per_node=-1": "it must be at least 0",
        "launch.dry_run=true": "there is no dry run of a function",
        "launch.nodes=2": "with hydra/launcher=submitit_local a run has one node",
    }.items():
        with pytest.raises(ConfigError, match=words):
            hpctrain.submit_function(rank, 1, overrides=[*place, wrong])
    assert len(list((tmp_path / "runs" / "functions").iterdir())) == 1


KEYS = (
    *("timeout_min=7", "cpus_per_task=2", "gpus_per_node=4", "tasks_per_node=2", "mem_gb=3"),
    *("nodes=2", "partition=p", "qos=q", "account=a", "constraint=c", "exclude=n1"),
    *("array_parallelism=3", "setup=[module load x]", "srun_args=[--label]", "signal_delay_s=60"),
    "max_num_timeout=4",
)


def experiment(folder: Path, name: str, defaults: str, hydra: str) -> None:
    """Write an experiment that is the digits with these settings of Hydra."""
    file = folder / "conf" / "experiment" / f"{name}.yaml"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(
        f"# @package _global_\ndefaults:\n  - digits\n{defaults}  - _self_\nhydra: {hydra}\n"
    )


@pytest.mark.parametrize("name", ["submitit_slurm", "hpctrain"])
def test_the_keys_of_submitits_launcher_are_read(where: list[str], name: str) -> None:
    given = [f"hydra.launcher.{key}" for key in KEYS]
    extra = "+hydra.launcher.additional_parameters={mail-user: me, comment: hi, requeue: true}"
    every = [*where, f"hydra/launcher={name}", *given, extra, "launch.mem_gb=5"]
    with composed(every, None) as call:
        (config,) = [call.composer.typed(run) for run in call.runs]
        notes = list(call.composer.notes)
    launch, site = config.launch, config.site
    assert (launch.nodes, launch.tasks_per_node, launch.cpus_per_task) == (2, 2, 2)
    assert (launch.gpus_per_node, launch.time_min, launch.warn_s) == (4, 7, 60)
    assert launch.max_running == 3
    assert launch.mem_gb == 5  # a key of ours on the command line has precedence
    assert (site.partition, site.qos, site.account, site.constraint) == ("p", "q", "a", "c")
    assert (site.setup, site.srun) == (["module load x"], ["--label"])
    assert site.sbatch == {"exclude": "n1", "comment": "hi", "mail-user": "me"}
    assert "hydra.launcher.timeout_min=7 is read as launch.time_min=7" in notes
    assert any(line.startswith("hydra.launcher.max_num_timeout=4 is not needed") for line in notes)
    assert "hydra.launcher.mem_gb=3 has no effect: launch.mem_gb is given, too" in notes
    assert any("requeue=true is not needed: every job" in line for line in notes)
    assert len(notes) == len(KEYS) + 3


def test_an_experiment_chooses_the_launcher_and_its_keys(where: list[str], tmp_path: Path) -> None:
    for name, minutes in (("slurm", 5), ("local", 6)):
        chosen = f"  - override /hydra/launcher: submitit_{name}\n"
        experiment(tmp_path, name, chosen, f"{{launcher: {{timeout_min: {minutes}}}}}")
    for name, minutes in (("slurm", 5), ("local", 6)):
        with composed([*where[1:], f"experiment={name}"], tmp_path / "conf") as call:
            assert call.local == (name == "local")
            assert call.composer.typed(call.runs[0]).launch.time_min == minutes
    with composed([*where[1:], "experiment=slurm,local"], tmp_path / "conf") as call:
        assert call.composer.typed(call.runs[0]).launch.time_min == 5
        with pytest.raises(ConfigError, match="this run has another hydra/launcher than the sweep"):
            call.composer.typed(call.runs[1])


def test_the_sweep_that_an_experiment_asks_for_is_not_lost(
    where: list[str], tmp_path: Path
) -> None:
    for name, rates in (("some", "1e-3,2e-3"), ("more", "1e-3,2e-3,3e-3")):
        experiment(tmp_path, name, "", f"{{sweeper: {{params: {{optimizer.lr: '{rates}'}}}}}}")
    with composed([*where[1:], "experiment=more"], tmp_path / "conf") as call:
        rates = [call.composer.typed(run).optimizer.lr for run in call.runs]
        assert rates == [0.001, 0.002, 0.003]
    with (
        composed([*where[1:], "experiment=some,more"], tmp_path / "conf") as call,
        pytest.raises(ConfigError, match=r"sweeps over optimizer\.lr \(hydra\.sweeper\.params"),
    ):
        call.composer.typed(call.runs[0])


@pytest.mark.parametrize("name", ["Slurm", "Local"])
def test_a_launcher_of_submitit_in_a_users_folder_is_ours(
    where: list[str], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "conf" / "hydra" / "launcher").mkdir(parents=True)
    (tmp_path / "conf" / "hydra" / "launcher" / "mine.yaml").write_text(
        "_target_: hydra_plugins.hydra_submitit_launcher.submitit_launcher."
        f"{name}Launcher\ntimeout_min: 9\nname: ${{hydra.job.name}}\ncpus_per_gpu: null\n"
    )
    given = [*where, "hydra/launcher=mine", "launch.snapshot=off"]
    with composed(given, tmp_path / "conf") as call:
        assert call.local == (name == "Local")
        assert call.composer.config_dir == f"{tmp_path}/conf"
        config = call.composer.typed(call.runs[0])
    assert (config.launch.time_min, config.name) == (9, "digits")
    submitted = []
    monkeypatch.setattr(Sweep, "submit", lambda sweep: submitted.append(sweep) or [None])
    monkeypatch.chdir(tmp_path)
    command_line.compose(["-m", "--config-dir", str(tmp_path / "conf"), *given])
    assert [sweep._local for sweep in submitted] == [name == "Local"]
    (entry,) = submitted[0].entries
    assert (entry.config.launch.time_min, entry.config_dir) == (9, f"{tmp_path}/conf")


def test_keys_of_submitits_launcher_that_are_not_read_are_named(where: list[str]) -> None:
    for key, words in {
        "foo=1": "unknown key hydra.launcher.foo: of submitit's keys these are read: nodes, ",
        "mem_per_cpu=1": "use launch.mem_gb with site.memory_option=mem-per-cpu",
        "timeout_min=abc": "launch.time_min=abc: it must be of type integer",
        "setup=ls": r"hydra.launcher.setup=ls \(site.setup: it must be a list, such as ",
        "additional_parameters=x": "additional_parameters=x: it must be options of sbatch",
    }.items():
        with pytest.raises(ConfigError, match=words):
            hpctrain.submit(*where, f"hydra.launcher.{key}")


def test_a_launcher_of_hydra_itself_is_refused(
    where: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="hydra/launcher: -m needs hpctrain"):
        command_line.compose(["-m", *where, "hydra/launcher=basic", "seed=1,2"])


def test_every_key_of_submitits_launcher_has_an_answer() -> None:
    from hydra_plugins.hydra_submitit_launcher.config import SlurmQueueConf

    answered = {*READ_AS, *NOT_NEEDED, *INSTEAD, "additional_parameters", "_target_"}
    assert set(SlurmQueueConf.__dataclass_fields__) <= answered
