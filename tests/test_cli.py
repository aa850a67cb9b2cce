"""The parts of the command line that have no other test."""

import sys

import pytest

import hpctrain
from hpctrain.cli import main


@pytest.mark.parametrize("arguments", [["--version"], ["experiment=digits", "--version"]])
def test_the_version_is_ours_and_not_hydras(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["hpctrain", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"hpctrain {hpctrain.__version__}\n"
