"""The parts of the command line that have no other test."""

import pytest

import hpctrain
from hpctrain import cli


@pytest.mark.parametrize("arguments", [["--version"], ["experiment=digits", "--version"]])
def test_the_version_is_ours_and_not_hydras(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli._dispatch(arguments) == 0
    assert capsys.readouterr().out == f"hpctrain {hpctrain.__version__}\n"
