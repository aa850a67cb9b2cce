"""Fixtures: commands in the test's process, and what worker processes would do, done there too."""

import os
import pickle

import hdf5plugin  # noqa: F401  before netCDF4, which leads HDF5 to filters of its own
import pytest
from hypothesis import settings

from data_prep import processes
from data_prep.cli import main
from hpctrain.base.terminal import progress_bar

# Other programs may use the machine, so an example has no time limit.
settings.register_profile("shared", deadline=None)
settings.load_profile("shared")


@pytest.fixture
def data_prep(capsys, monkeypatch):
    """Return a function that runs a command and returns (exit code, stdout, stderr).

    Its attribute `refused` runs a command that must fail, and returns what it says.
    `data_prep.refuses(code, words, *command)` checks an exit code and words on stderr.

    A command has one worker process unless it says `--workers`: as many as there are cores would
    cost a second of CPU time in each test.
    """
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    # On a busy machine a command takes longer, and would print a line of progress.
    monkeypatch.setattr(progress_bar, "EVERY_S", 3600.0)

    def run(*args):
        try:
            code = main([str(arg) for arg in args])
        except SystemExit as stopped:  # argparse exits after --help and usage errors
            code = stopped.code
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    def refused(*args, code=3):
        """Run a command that must fail with one line, and return the line."""
        found, out, err = run(*args)
        assert (found, out, err.count("\n")) == (code, "", 1), err
        assert err.startswith("data_prep: ")
        return err

    run.refused = refused

    def refuses(code, words, *args):
        found, _, err = run(*args)
        assert found == code, err
        for each in (words,) if isinstance(words, str) else words:
            assert each in err

    run.refuses = refuses
    return run


@pytest.fixture
def here(tmp_path, monkeypatch):
    """Change to an empty folder. A module has `pytestmark = pytest.mark.usefixtures("here")`."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(params=["here", pytest.param("processes", marks=pytest.mark.slow)])
def any_workers(request, monkeypatch):
    """Let `--workers 2` do its tasks as worker processes would, but in this process.

    Each task is done by a copy of its own that was pickled, the last task first. So a task that
    cannot be sent, that needs what another task has left, or whose number decides something would
    be found. The slow variant has real worker processes.
    """

    def run(task, numbers, workers, progress, finish):
        content = pickle.dumps(task)
        for number in reversed(numbers):
            returned = pickle.loads(content)(number, progress)
            yield number, finish(number, pickle.loads(pickle.dumps(returned)))

    if request.param == "here":
        monkeypatch.setattr(processes, "_run_in_processes", run)
