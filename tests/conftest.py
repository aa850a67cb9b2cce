"""Fixtures and helpers of all tests: the digits in HDF5 shards, and commands as users type them."""

import json
import logging
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings

from tests import bounds, forkserver
from tests.hooks import (  # noqa: F401  conftest.py is where pytest looks for them
    pytest_addoption,
    pytest_collection_finish,
    pytest_collection_modifyitems,
    pytest_collectreport,
    pytest_ignore_collect,
    pytest_make_collect_report,
    pytest_runtest_logreport,
    pytest_runtest_makereport,
    pytest_runtest_setup,
    pytest_sessionfinish,
    pytest_terminal_summary,
    pytest_testnodedown,
    pytest_xdist_make_scheduler,
)

if TYPE_CHECKING:
    from hpctrain.config.composing.compose_sweep import Composer
    from tests.cluster import Paced

pytest_plugins = ["hpctrain.testing.fixtures"]
# Each rank has one thread, because the machine has few cores and the tests have many processes.
os.environ["OMP_NUM_THREADS"] = "1"
# torch.compile need not try which vector instructions the compiler knows, which takes 7 s.
os.environ["TORCHINDUCTOR_VEC_ISA_OK"] = "1"
# If the test process itself is a rank of a launcher, the tests must not see it.
for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "MLFLOW_TRACKING_URI"):
    os.environ.pop(name, None)
# GNU's readline sets these in the workers of pytest-xdist, and would cut tables to 80 characters.
for name in ("COLUMNS", "LINES"):
    os.environ.pop(name, None)
forkserver.begin()
bounds.install()
# Where the tests run in the background (`nohup make test &` in a script, CI systems), the shell has
# had SIGINT ignored, and every process that a test starts would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

Completed = subprocess.CompletedProcess[str]
ROOT = Path(__file__).parents[1]
# A busy machine is no fault of a test.
settings.register_profile(
    "busy", suppress_health_check=[HealthCheck.too_slow], deadline=None, derandomize=True
)
settings.load_profile("busy")
# A user's own model for the digits, chosen by `model._target_=my_net.Net` next to the command.
NET = """\
import torch

class Net(torch.nn.Linear):
    def __init__(self, **_):
        super().__init__(64, 10)

    def forward(self, image):
        return super().forward(image.flatten(1).float())
"""


def shared(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], Any]) -> Path:
    """Return a file or folder that all test processes share; tests must not change it.

    The first process that needs it calls `make` with its path. tests/run.sh names a folder that its
    runs of pytest share.
    """
    from hpctrain.base.files.lock import file_lock

    folder = factory.getbasetemp()
    folder = folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder
    folder = Path(os.environ.get("HPCTRAIN_TESTS_SHARED", folder))
    with file_lock(folder / f"{name}.lock", lambda: time.sleep(0.1)):
        if not (folder / f"{name}.made").exists():
            make(folder / name)
            (folder / f"{name}.made").touch()
    return folder / name


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    """What a test draws does not depend on the tests before it, nor on chance."""
    random.seed(0)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(0)
    if torch := sys.modules.get("torch"):
        torch.default_generator.manual_seed(0)  # `torch.manual_seed` notes the stack, for 3 ms
        if torch.cuda.is_initialized():
            torch.cuda.manual_seed_all(0)
    yield
    if torch := sys.modules.get("torch"):
        torch.set_default_dtype(torch.float32)  # precision=fp64 has another


@pytest.fixture(scope="session")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The data set of scikit-learn's digits, written by data_prep."""

    def make(folder: Path) -> None:
        run_module("data_prep", "sample", "digits", str(folder))

    return shared(tmp_path_factory, "digits", make)


@pytest.fixture
def train(digits: Path, tmp_path: Path) -> Callable[..., Completed]:
    """A function that runs `hpctrain experiment=digits ARGUMENTS` with runs in tmp_path/runs.

    It takes what `hpctrain_on` and `run_module` take. Jobs run the code where it is: each process
    of a job would compile all modules of a copy. A test of copies gives launch.snapshot=auto.
    """

    def call(*arguments: str, ranks: int = 1, **options: Any) -> Completed:
        where = [f"data.path={digits}", f"output_dir={tmp_path}/runs"]
        if "-m" in arguments and "launch.snapshot" not in " ".join(arguments):
            where.append("launch.snapshot=off")
        given = ("experiment=digits", *where, *arguments)
        return hpctrain_on(ranks, *given, cwd=tmp_path, **options)

    return call


@pytest.fixture(scope="session")
def reference(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A function that returns the run directory of a training; tests must not change it.

    Each training is made once per test process.
    """
    made: dict[tuple[str, ...], Path] = {}

    def call(*arguments: str) -> Path:
        if arguments not in made:
            folder = tmp_path_factory.mktemp("reference")
            where = [f"data.path={digits}", f"output_dir={folder}/runs"]
            run_module("hpctrain", "experiment=digits", *where, *arguments, cwd=folder)
            (made[arguments],) = runs(folder / "runs")
        return made[arguments]

    return call


@pytest.fixture(scope="session")
def composer() -> "Composer":
    """Composes configs as a sweep does: equal to Hydra's (test_sweep.py), but in milliseconds."""
    return make_composer()


@pytest.fixture(scope="session")
def empty_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An MLflow store without runs. It takes seconds to create, so tests must copy it."""

    def make(path: Path) -> None:
        done = run_module("tests.tracking.make_store", str(path), "hpctrain", "exp", cwd=ROOT)
        assert done.stdout == "['1', '2']\n", done.stderr

    return shared(tmp_path_factory, "empty.db", make)


def copy_store(empty: Path, path: Path) -> Path:
    """Copy a store without runs; the copy keeps files of runs beside itself, as each store does."""
    shutil.copy(empty, path)
    with closing(sqlite3.connect(path)) as copy, copy:
        place = path.with_name("mlartifacts").as_uri()
        copy.execute("UPDATE experiments SET artifact_location = ?", (place,))
    return path


@pytest.fixture
def store(empty_store: Path, tmp_path: Path) -> Path:
    """The store of the runs in tmp_path/runs: a copy, so that no run has to create it."""
    (tmp_path / "runs").mkdir(mode=0o700)
    return copy_store(empty_store, tmp_path / "runs" / "mlflow.db")


@pytest.fixture
def no_sbatch(tmp_path: Path) -> dict[str, str]:
    """Environment variables with a PATH that has no scheduler."""
    empty = tmp_path / "bin"
    empty.mkdir()
    return {"PATH": str(empty)}


@pytest.fixture
def no_slurm(no_sbatch: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A PATH that has no scheduler, also for this process."""
    monkeypatch.setenv("PATH", no_sbatch["PATH"])


@pytest.fixture
def empty_queue(slurm_cluster: object) -> Iterator[None]:
    """The development cluster. Afterwards all jobs are cancelled and the queue is empty."""
    from tests import cluster

    yield
    subprocess.run(["scancel", "--me"], check=False)
    cluster.wait_for(lambda: not cluster.queue(), 60, "an empty queue")


@pytest.fixture
def paced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> "Paced":
    """A task with slow steps, so that a test reaches a run before the run ends."""
    from tests.cluster import Paced

    return Paced(tmp_path / "paced", monkeypatch)


@pytest.fixture
def group_of_one() -> Iterator[None]:
    """A process group of only this process, on the CPU."""
    from hpctrain.cluster.ranks.ranks import RankInfo
    from hpctrain.config.schema import ParallelConfig
    from hpctrain.engine.distributed.group import process_group

    alone = RankInfo.from_env({"HPCTRAIN_LAUNCHER": "single"})
    with process_group(alone, ParallelConfig(device="cpu")):
        yield


def make_composer(*folders: Path) -> "Composer":
    """Return a composer for a sweep with the configs of these folders, which come first."""
    from hydra._internal.config_loader_impl import ConfigLoaderImpl
    from hydra._internal.utils import create_config_search_path
    from hydra.core.config_store import ConfigStore
    from hydra.types import RunMode

    from hpctrain.base.files.yaml_file import conf_dir
    from hpctrain.config.composing.compose_sweep import Composer
    from hpctrain.config.schema import Config

    ConfigStore.instance().store(name="schema", node=Config)
    search_path = create_config_search_path(str(conf_dir()))
    for folder in folders:
        search_path.prepend("tests", f"file://{folder}")
    loader = ConfigLoaderImpl(search_path)
    return Composer(loader, loader.load_configuration("config", [], run_mode=RunMode.MULTIRUN))


def run_module(
    module: str,
    *arguments: str,
    code: int = 0,
    cwd: Path | None = None,
    new: bool = False,
    timeout: float = 240,
    **env: str,
) -> Completed:
    """Run `python -m MODULE ARGUMENTS`, which must exit with `code`.

    With `new`, it is always a new Python; without, it may be a fork. `env` changes the environment.
    """
    done = (subprocess if new else forkserver).run(
        [sys.executable, "-m", module, *arguments],
        capture_output=True,
        text=True,
        cwd=cwd,
        env=os.environ | env,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == code, f"{done.args}: {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


def torchrun(ranks: int, *arguments: str, **options: Any) -> Completed:
    """Run `python -m hpctrain ARGUMENTS` on ranks of torchrun, as `run_module` runs modules."""
    several = ("--standalone", f"--nproc-per-node={ranks}", "-m", "hpctrain")
    return run_module("torch.distributed.run", *several, *arguments, **options)


def hpctrain_on(ranks: int, *arguments: str, **options: Any) -> Completed:
    """Do what `torchrun` does, but one rank is a process without it."""
    if ranks == 1:
        return run_module("hpctrain", *arguments, **options)
    return torchrun(ranks, *arguments, **options)


def linked_python(folder: Path) -> Path:
    """Make an environment in `folder` with the packages of this one; return its Python, a link."""
    python = folder / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)
    config = Path(sys.prefix, "pyvenv.cfg")
    if config.exists():
        (folder / "pyvenv.cfg").write_text(config.read_text())
    (folder / "lib").symlink_to(Path(sys.prefix, "lib"))
    return python


@contextmanager
def ignoring_sigint() -> Iterator[None]:
    """Let processes start with SIGINT ignored, as those of `command &` in a shell script do."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def run_json(run: Path) -> dict[str, Any]:
    """Return the content of a run directory's run.json."""
    content = json.loads((run / "run.json").read_text())
    assert isinstance(content, dict)
    return content


def runs(folder: Path) -> list[Path]:
    """Return the run directories in `folder`, which is an `output_dir`, sorted by name."""
    return sorted(path.parent for path in folder.glob("*/run.json"))


def only_run(folder: Path) -> Path:
    """Return the one run directory in `folder / "runs"`."""
    (run,) = runs(folder / "runs")
    return run


def journal(run: Path) -> list[dict[str, Any]]:
    """Return the records of a run's journal."""
    lines = (run / "journal" / "events.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def journal_metrics(run: Path) -> dict[tuple[str, int], float]:
    """Return the last value of every tracked metric by (name, step), except times (`perf/`)."""
    metrics = {}
    for record in journal(run):
        if record["kind"] == "metrics":
            for name, value in record["metrics"].items():
                if not name.startswith("perf/"):
                    metrics[name, record["step"]] = value
    return metrics


@contextmanager
def process_kept() -> Iterator[None]:
    """Let a command that is called in this process leave its log and its umask as they were."""
    root = logging.getLogger()
    handlers, level, umask = [*root.handlers], root.level, os.umask(0o077)
    try:
        yield
    finally:
        os.umask(umask)
        root.handlers[:] = handlers
        root.setLevel(level)
