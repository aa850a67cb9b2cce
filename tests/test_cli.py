"""The parts of the command line that have no other test."""

import pytest

import hpctrain
from hpctrain import cli


@pytest.mark.parametrize(
    "arguments",
    [["--version"], ["experiment=digits", "--version"], ["--local-rank=1", "--version"]],
)
def test_the_version_is_ours_and_not_hydras(
    arguments: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")  # as torch.distributed.launch sets it, beside the option
    assert cli._dispatch(arguments) == 0
    assert capsys.readouterr().out == f"hpctrain {hpctrain.__version__}\n"
