"""The parts of the command line that have no other test."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import hpctrain
from hpctrain import cli
from hpctrain.errors import ConfigError
from tests.conftest import run_module


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


@pytest.mark.parametrize(
    ("word", "hint"),
    [
        ("stop", "did you mean cancel? "),
        ("delete", "did you mean gc (a run is deleted with its directory)? "),
        ("list", "did you mean status? "),
        ("statsu", "did you mean status? "),
        ("xyzzy", ""),
    ],
)
def test_a_word_for_a_command_that_has_another_name(word: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        cli._dispatch([word])
    assert str(caught.value).startswith(f"{word}: no such command; {hint}commands are freeze, run")
    assert word not in cli.COMMANDS


def test_the_help_fits_a_terminal_of_80_columns(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli._dispatch(["--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    words = " ".join(lines).split()
    assert {"rtx_pro_ws", "+scaling", "train."} <= {*words}


def test_a_full_disk_below_the_output_is_one_sentence() -> None:
    command = [sys.executable, "-m", "hpctrain", "metrics"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=-1, text=True, check=False)
    said = "error: standard output: cannot be written (No space left on device)\n"
    assert (done.returncode, done.stderr) == (6, said)


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount file systems")
def test_a_disk_that_takes_nothing_more(reference: Callable[..., Path], tmp_path: Path) -> None:
    """Numbers are shown before they are kept, and a full disk is one sentence."""
    runs, full = tmp_path / "runs", tmp_path / "full"
    for folder in (runs, full):
        folder.mkdir()
    run = reference()
    (run / "evaluations").mkdir(exist_ok=True)
    subprocess.run(["mount", "--bind", run.parent, runs], check=True)
    subprocess.run(["mount", "-o", "remount,ro,bind", runs], check=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=100k", "tmpfs", full], check=True)
    try:
        done = run_module("hpctrain", "evaluate", str(runs / run.name), code=6)
        assert "accuracy" in done.stdout
        assert "the result is not kept (Read-only file system)" in done.stderr
        done = run_module("hpctrain", "evaluate", str(runs / run.name), "--record", code=6)
        assert "it is val/loss=" in done.stderr
        done = run_module("hpctrain", "export", str(run), str(full / "out"), code=6)
        assert "No space left on device" in done.stderr
        assert "Traceback" not in done.stderr
    finally:
        subprocess.run(["umount", runs, full], check=True)
