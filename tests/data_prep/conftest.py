"""This file provides the fixture `data_prep`, which runs a command in the test's process."""

import pytest

from data_prep.cli import main


@pytest.fixture
def data_prep(capsys):
    """Return a function that runs a command and returns (exit code, stdout, stderr)."""

    def run(*args):
        try:
            code = main([str(arg) for arg in args])
        except SystemExit as stopped:  # argparse exits after --help and usage errors
            code = stopped.code
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run
