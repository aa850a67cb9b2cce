import pytest

from data_prep.cli import main


@pytest.fixture
def data_prep(capsys):
    """Return a function that runs a command here; it returns exit code, stdout and stderr."""

    def run(*args):
        try:
            code = main([str(arg) for arg in args])
        except SystemExit as stopped:  # argparse
            code = stopped.code
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run
