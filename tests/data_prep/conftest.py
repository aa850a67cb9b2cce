"""This file provides the fixture `data_prep`, which runs a command in the test's process."""

import pytest

from data_prep import progress_bar
from data_prep.cli import main


@pytest.fixture
def data_prep(capsys, monkeypatch):
    """Return a function that runs a command and returns (exit code, stdout, stderr)."""
    # On a busy machine a command takes longer, and would print a line of progress.
    monkeypatch.setattr(progress_bar, "EVERY_S", 3600.0)

    def run(*args):
        try:
            code = main([str(arg) for arg in args])
        except SystemExit as stopped:  # argparse exits after --help and usage errors
            code = stopped.code
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run
