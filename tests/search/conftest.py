"""Searches that are begun in this process, without a worker: a test takes the worker's place."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hpctrain.cli import main
from hpctrain.search.search import Search
from hpctrain.search.worker_arrays import WorkerFile, new_worker
from hpctrain.search.workers import Worker
from tests.conftest import process_kept

Begin = Callable[..., Path]
QUIET = ("launch.snapshot=off", "tracking=off")
# Its trainings wait as long as the file `hold` is there, however fast the machine is.
HELD = """\
import os, time
from hpctrain.tasks import Classification

class Task(Classification):
    def __call__(self, model, batch):
        while os.path.exists(os.path.dirname(__file__) + "/hold"):
            time.sleep(0.1)
        return super().__call__(model, batch)
"""


@pytest.fixture
def begin(
    digits: Path,
    tmp_path: Path,
    no_slurm: None,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Begin]:
    """A function that begins a search, or goes on with it, and returns its folder.

    It raises a SystemExit with the code if the search is refused.
    """

    def call(*arguments: str) -> Path:
        folders: list[Path] = []
        monkeypatch.setattr(
            Search, "_run_here", lambda own, config, folder, *_: folders.append(folder)
        )
        monkeypatch.setattr(Search, "_report", lambda *_: None)
        where = [f"data.path={digits}", f"output_dir={tmp_path}/runs"]
        search = ["-m", "hydra/sweeper=optuna", "hydra.sweeper.direction=maximize"]
        given = ["experiment=digits", *where, *search, *QUIET, *arguments]
        monkeypatch.setattr(sys, "argv", ["hpctrain", *given])
        with pytest.raises(SystemExit) as end:
            main()
        if end.value.code:
            raise end.value
        (folder,) = folders
        return folder

    monkeypatch.chdir(tmp_path)
    with process_kept():
        yield call


def worker(sweep: Path) -> Worker:
    return Worker(new_worker(sweep, WorkerFile()))
